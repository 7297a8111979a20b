"""What an endpoint's answer looks like, and the shape that both endpoints share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from penstock.http.plan import Plan
from penstock.wire.messages import Delta

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def fields(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Dialect(Protocol):
    """Renders one request's answer. It lives as long as the request and may keep state a choice, such as text offsets."""

    def opening(self, index: int) -> str:
        """Text that a choice begins with before anything is generated: the prompt, when it is to be echoed."""

    def logprobs(self, index: int, delta: Delta, tokens: int) -> object:
        """The logprobs of the delta's first `tokens` tokens, in the dialect's shape; None without."""

    def event(self, index: int, text: str, logprobs: object, finish_reason: str | None, nvext: object) -> bytes:
        """One streamed event. `nvext`, if there is any, is what the answer says beyond the API: it comes with the last event."""

    def usage_event(self, usage: Usage) -> bytes:
        """The event that carries the usage of a stream."""

    def body(self, choices: Sequence[tuple[str, list[object], str]], usage: Usage, nvext: object) -> bytes:
        """The whole answer: for each choice its text, the logprobs of its parts, and its finish reason."""


class Envelope:
    """The fields around the choices, and events made of a fixed frame with the text put in.

    Encoding the frame once a request leaves one small JSON string to encode an event.
    """

    def __init__(self, prefix: str, kind: str, plan: Plan) -> None:
        self._fields = {
            "id": f"{prefix}-{plan.response_id}",
            "object": kind,
            "created": int(time.time()),
            "model": plan.model.info.name,
        }
        self._opening = b"data: " + msgspec.json.encode(self._fields)[:-1] + b',"choices":[{"index":'
        usage = b',"usage":null' if plan.include_usage else b""
        self._usage = usage
        self._closing = b"}]" + usage + b"}\n\n"
        self._plain_closing = b',"logprobs":null,"finish_reason":null' + self._closing

    def event(self, index: int, content: bytes, logprobs: object, finish_reason: str | None, nvext: object) -> bytes:
        """`content` is the rendered member that holds the text, with a comma before it."""
        opening = b"%b%d%b" % (self._opening, index, content)
        if logprobs is None and finish_reason is None:
            return opening + self._plain_closing
        closing = self._closing if nvext is None else b'}]%b,"nvext":%b}\n\n' % (self._usage, msgspec.json.encode(nvext))
        rest = (msgspec.json.encode(logprobs), msgspec.json.encode(finish_reason), closing)
        return opening + b',"logprobs":%b,"finish_reason":%b%b' % rest

    def usage_event(self, usage: Usage) -> bytes:
        return b"data: " + msgspec.json.encode({**self._fields, "choices": [], "usage": usage.fields()}) + b"\n\n"

    def body(self, kind: str, choices: list[dict[str, object]], usage: Usage, nvext: object) -> bytes:
        fields = {**self._fields, "object": kind, "choices": choices, "usage": usage.fields()}
        return msgspec.json.encode(fields if nvext is None else {**fields, "nvext": nvext})
