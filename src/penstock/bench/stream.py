"""The record of one request's stream."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.backends.http.dialects import message_in
from penstock.backends.http.sse import DONE

MAX_MESSAGE_CHARACTERS = 300


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True, eq=False)
class Stream:
    """The record of one request. It is filled in while the request runs, so an interrupted one is kept, too.

    `times` and `sizes` have the time and the number of characters of each read with text.
    """

    number: int
    seed: int
    started: float = 0.0
    ended: float = 0.0
    times: array[float] = field(default_factory=lambda: array("d"))
    sizes: array[int] = field(default_factory=lambda: array("L"))
    parts: list[str] = field(default_factory=list)
    events: int = 0
    completion_tokens: int | None = None
    finish_reason: str | None = None
    done: bool = False
    error: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def is_complete(self) -> bool:
        """The stream ended normally. A stream that is not complete and has no error was interrupted by Ctrl-C."""
        return self.done and self.error is None

    @property
    def tokens(self) -> int:
        """As the server counts them. Without usage, each event with text counts as one."""
        return len(self.parts) if self.completion_tokens is None else self.completion_tokens

    def take(self, payloads: list[bytes], now: float) -> None:
        """Takes the events of one read. Raises msgspec.DecodeError for an event that is not a chunk."""
        characters = 0
        for payload in payloads:
            if payload == DONE:
                self.done = True
                continue
            chunk = _CHUNKS.decode(payload)
            self.events += 1
            if chunk.error is not None:
                self.error = f"error event: {error_message(chunk.error)}"
            if chunk.usage is not None:
                self.completion_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                characters += self._take_choice(choice)
        if characters:
            self.times.append(now)
            self.sizes.append(characters)

    def _take_choice(self, choice: _Choice) -> int:
        delta = choice.delta
        text = choice.text if delta is None else delta.content or delta.reasoning_content or delta.reasoning
        if self.finish_reason is not None and (text or choice.finish_reason is not None):
            self.error = "the stream continued after its finish"
        if choice.finish_reason is not None:
            self.finish_reason = choice.finish_reason
        if not text:
            return 0
        self.parts.append(text)
        return len(text)


def error_message(error: Any) -> str:
    """The message of an error, shortened."""
    message = message_in(error)
    return message if len(message) <= MAX_MESSAGE_CHARACTERS else message[:MAX_MESSAGE_CHARACTERS] + "…"
