"""Images in the texts of a chat, from their marks to their tokens.

A mark has characters that no client can send: UTF-8 has no bytes for lone surrogates. So the content of a message stays a string, and
rewrites, templates and transcripts carry marks along with the text. All marks have the same length, so naming an image moves no text.

Many templates want an image as a part of its own and write a placeholder for it. These placeholders become marks again. If a text of
the chat has the same letters, BREAK cuts them, so they stay text: only an image has the tokens of an image.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import structs

from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt, Tokenizer
from penstock.wire.images import IMAGE_NAME_BYTES, ImageLayout, image_ids

EDGE = "\ud807"
"""The first and the last character of each mark."""

BREAK = "\ud808"
"""What stands before and after it is tokenized separately, and it has no token itself."""

_DIGITS = 2 * IMAGE_NAME_BYTES
IMAGE_MARK = re.compile(f"{EDGE}([0-9a-f]{{{_DIGITS}}}){EDGE}")
MARK_CHARACTERS = _DIGITS + 2


def image_mark(index: int) -> str:
    """The mark of an image that is not read yet: its place among the images of the request."""
    return f"{EDGE}{index:0{_DIGITS}d}{EDGE}"


def named_mark(name: bytes) -> str:
    """The mark of the image with this name."""
    return f"{EDGE}{name.hex()}{EDGE}"


def marked_name(mark: str) -> bytes:
    """The name in a named mark."""
    return bytes.fromhex(mark[1:-1])


def count_marks(texts: Iterable[str]) -> Counter[str]:
    """How often each mark is in these texts."""
    return Counter([mark for text in texts for mark in IMAGE_MARK.findall(text)])


def as_parts(content: str) -> list[dict[str, str]]:
    """A content with marks as a list of parts, as templates read them."""
    parts = []
    for index, piece in enumerate(IMAGE_MARK.split(content)):
        if index % 2:
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def with_marks(rendered: str, placeholder: str, names: Sequence[str]) -> str:
    """The rendered text with marks of these names, in hexadecimal, in place of the placeholders. Unchanged if their numbers differ."""
    pieces = rendered.split(placeholder)
    if len(pieces) != len(names) + 1:
        return rendered
    return "".join([pieces[0], *(f"{EDGE}{name}{EDGE}{piece}" for name, piece in zip(names, pieces[1:], strict=True))])


def without_placeholders(prompt: ChatPrompt) -> ChatPrompt:
    """The prompt with BREAK in each placeholder that somebody has written."""
    broken = re.compile(re.escape(prompt.image_placeholder))
    fields = ("messages", "tools", "documents", "arguments")
    return structs.replace(prompt, **{field: _broken(getattr(prompt, field), broken) for field in fields})


def break_all(text: str, literals: re.Pattern[str]) -> str:
    """The text with BREAK behind the first letter of each of these literals."""
    return literals.sub(lambda found: f"{found[0][0]}{BREAK}{found[0][1:]}", text)


def without_marks(message: ChatMessage) -> ChatMessage:
    return ChatMessage({**message, "content": IMAGE_MARK.sub("", message["content"])})


def cut_at_marks(tokenizer: Tokenizer, text: str) -> list[str]:
    """The tokenizer's parts of a text, and each mark as a part. The last one is no mark: an answer continues it."""
    parts: list[str] = []
    for index, piece in enumerate(IMAGE_MARK.split(text)):
        if index % 2:
            parts.append(f"{EDGE}{piece}{EDGE}")
        elif piece:
            parts += tokenizer.parts(piece)
    return [*parts, ""] if text.endswith(EDGE) else parts


def encode_image(tokenizer: Tokenizer, layout: ImageLayout) -> list[int]:
    """The tokens of an image: its positions, and the text between them."""
    drawn = image_ids(layout.name, layout.positions)
    token_ids: list[int] = []
    used = 0
    for piece in layout.pieces:
        if isinstance(piece, str):
            token_ids += tokenizer.encode_part(piece)
        else:
            token_ids += drawn[used : used + piece]
            used += piece
    return token_ids


def _broken(value: Any, literals: re.Pattern[str]) -> Any:
    match value:
        case str():
            return break_all(value, literals)
        case Mapping():
            return {_broken(key, literals): _broken(member, literals) for key, member in value.items()}
        case list() | tuple():
            return [_broken(member, literals) for member in value]
    return value
