"""Renders answers as Anthropic's messages, and as the events of a stream of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from penstock.api.anthropic.blocks import BlockDelta, Blocks, BlockStart, Kind, Step, whole_blocks
from penstock.api.anthropic.errors import fault_content
from penstock.api.pipeline.dialect import Answer, ChoiceDelta, Dialect, Ending, Usage
from penstock.api.pipeline.plan import Plan
from penstock.wire.messages import Fault

_HOUR = 3_600.0
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_WINDOW_EXCEEDED = "model_context_window_exceeded"
_DELTA_TYPES: dict[Kind, str] = {
    "text": "text_delta",
    "thinking": "thinking_delta",
    "signature": "signature_delta",
    "partial_json": "input_json_delta",
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_TEXT_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%b}}\n\n'


class MessagesDialect(Dialect):
    """Renders `message` objects and their streams.

    `fills_window`: the client asked for more tokens than the context has room for, so an answer that reaches its limit has filled the
    context.
    """

    def __init__(self, plan: Plan, *, shows_thinking: bool = True, fills_window: bool = False) -> None:
        self.id = f"msg_{plan.response_id}"
        self._model = plan.model.info.name
        self._grammar_field = plan.grammar_field
        self._shows_thinking = shows_thinking
        self._fills_window = fills_window
        self._blocks = Blocks(shows_thinking)
        self._ending = Ending("stop")
        self._nvext: dict[str, object] | None = None

    def keep_alive(self) -> bytes:
        """A ping. It may come before `message_start`, which waits until the cached tokens are known."""
        return _PING

    def begin(self, usage: Usage) -> bytes:
        message = self._message([], None, self._usage(usage))
        return _event("message_start", {"message": message}) + _PING

    def event(self, index: int, added: ChoiceDelta) -> bytes:  # noqa: ARG002
        parts, ending = added.parts, added.ending
        if ending is None and len(parts) == 1 and type(parts[0]) is str and self._blocks.is_in_text:
            return _TEXT_DELTA % (self._blocks.number, msgspec.json.encode(parts[0]))
        events = _rendered(self._blocks.feed(parts))
        if ending is None:
            return events
        self._ending = ending
        self._nvext = added.nvext
        return events + _rendered(self._blocks.finish())

    def end(self, usage: Usage) -> bytes:
        fields: dict[str, Any] = {"delta": self._ended(self._ending), "usage": self._usage(usage)}
        if self._nvext is not None:
            fields["nvext"] = self._nvext
        return _event("message_delta", fields) + _event("message_stop", {})

    def fault(self, fault: Fault) -> bytes:
        return _event("error", {"error": fault_content(fault, self._grammar_field)})

    def body(self, answers: Sequence[Answer], usage: Usage, nvext: dict[str, object] | None) -> Iterator[bytes]:
        (answer,) = answers
        message = self._message(whole_blocks(answer.parts, self._shows_thinking), answer.ending, self._usage(usage))
        yield msgspec.json.encode(message if nvext is None else {**message, "nvext": nvext})

    def _message(self, content: list[dict[str, Any]], ending: Ending | None, usage: dict[str, Any]) -> dict[str, Any]:
        message = {"id": self.id, "type": "message", "role": "assistant", "model": self._model, "content": content}
        return {**message, **self._ended(ending), "usage": usage}

    def _ended(self, ending: Ending | None) -> dict[str, Any]:
        if ending is None:
            return {"stop_reason": None, "stop_sequence": None}
        if ending.reason == "stop" and ending.stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop}
        if ending.reason == "length" and self._fills_window:
            return {"stop_reason": _WINDOW_EXCEEDED, "stop_sequence": None}
        return {"stop_reason": _STOP_REASONS.get(ending.reason, "end_turn"), "stop_sequence": None}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        """Counts each prompt token once: as read from the cache, as written to it because the client asked for that, or as input."""
        written, for_an_hour = usage.written_tokens, usage.written_for(_HOUR)
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation": {
                "ephemeral_5m_input_tokens": written - for_an_hour,
                "ephemeral_1h_input_tokens": for_an_hour,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
            "service_tier": "standard",
        }


def _rendered(steps: Iterable[Step]) -> bytes:
    return b"".join(map(_step_event, steps))


def _step_event(step: Step) -> bytes:
    if isinstance(step, BlockStart):
        return _event("content_block_start", {"index": step.number, "content_block": step.block})
    if isinstance(step, BlockDelta):
        delta = {"type": _DELTA_TYPES[step.kind], step.kind: step.text}
        return _event("content_block_delta", {"index": step.number, "delta": delta})
    return _event("content_block_stop", {"index": step.number})


def _event(kind: str, fields: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))
