"""Pictures, and requests with them by the official clients: greedy, with one seed."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from functools import cache
from typing import Any, NamedTuple

from anthropic import Anthropic

from e2e.harness import Server
from e2e.images.setups import MODEL

TOKENS = 16
SIZE = (160, 96)


@cache
def png(number: int, size: tuple[int, int] = SIZE, note: bytes = b"") -> bytes:
    """The file of a picture that is like no other. With a note it is another file of the same pixels."""
    width, height = size
    noise = random.Random(number)
    rows = b"".join(b"\0" + noise.randbytes(3 * width) for _ in range(height))
    chunks = {b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), **({b"tEXt": b"note\0" + note} if note else {})}
    chunks |= {b"IDAT": zlib.compress(rows, 9 if note else 1), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks.items())


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def encoded(number: int, size: tuple[int, int] = SIZE, note: bytes = b"") -> str:
    return base64.b64encode(png(number, size, note)).decode()


def url(number: int, size: tuple[int, int] = SIZE, note: bytes = b"") -> str:
    return f"data:image/png;base64,{encoded(number, size, note)}"


def shown(*parts: int | str) -> list[dict[str, Any]]:
    """The content of a message of a chat: texts, and pictures by their numbers."""
    return [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]


def given(*parts: int | str) -> list[dict[str, Any]]:
    """The same for a response."""
    return [
        {"type": "input_text", "text": part} if isinstance(part, str) else {"type": "input_image", "image_url": url(part), "detail": "auto"}
        for part in parts
    ]


def blocks(*parts: int | str) -> list[dict[str, Any]]:
    """The same for Anthropic's messages."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(part)}}
        for part in parts
    ]


def user(*parts: int | str) -> Any:
    return {"role": "user", "content": shown(*parts)}


class Told(NamedTuple):
    """An answer, and how many tokens its prompt had, and how many of these were cached."""

    text: str
    prompt: int
    cached: int = 0
    id: str = ""


def chat(server: Server, *messages: Any, stream: bool = False, **fields: Any) -> Told:
    options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answers: Any = server.client.chat.completions.create(
        model=MODEL, messages=list(messages), max_tokens=TOKENS, temperature=0, seed=7, timeout=120, **options, **fields
    )
    text, usage = "", None
    for answer in answers if stream else [answers]:
        text += "".join((choice.delta if stream else choice.message).content or "" for choice in answer.choices)
        usage = answer.usage or usage
    assert usage is not None
    return Told(text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)


def respond(server: Server, content: Any, stream: bool = False, **fields: Any) -> Told:
    """A response to items, or to the content of one message."""
    items: Any = content if "role" in content[0] else [{"role": "user", "content": content}]
    made: Any = server.client.responses.create(
        model=MODEL, input=items, max_output_tokens=TOKENS, temperature=0, timeout=120, stream=stream, extra_body={"seed": 7}, **fields
    )
    text = ""
    if stream:
        events = list(made)
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        made = events[-1].response
        assert text == made.output_text
    return Told(made.output_text, made.usage.input_tokens, made.usage.input_tokens_details.cached_tokens, made.id)


def message(anthropic: Anthropic, *messages: Any, stream: bool = False, **fields: Any) -> Told:
    asked: Any = {"model": MODEL, "max_tokens": TOKENS, "messages": list(messages), "extra_body": {"temperature": 0}, **fields}
    if stream:
        with anthropic.messages.stream(**asked) as events:
            text, made = "".join(events.text_stream), events.get_final_message()
    else:
        made = anthropic.messages.create(**asked)
        text = "".join(block.text for block in made.content if block.type == "text")
    usage = made.usage
    cached = usage.cache_read_input_tokens or 0
    return Told(text, usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0), cached)
