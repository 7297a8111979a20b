"""The Response object and its stream of typed events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import msgspec

from penstock.api.errors import fault_status
from penstock.api.pipeline.dialect import Answer, ChoiceDelta, Dialect, Ending, Usage, token_logprobs
from penstock.api.pipeline.response import KEEP_ALIVE
from penstock.api.responses.answers import (
    CacheWriteTokensDetails,
    IncompleteDetails,
    InputTokensDetails,
    ReasoningTokensDetails,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from penstock.api.responses.items import Item
from penstock.api.responses.output import Events, OutputItems, encoded_event
from penstock.api.responses.tools import CalledTool
from penstock.text.output import without_broken_calls
from penstock.wire.errors import GenerationFault, RequestError
from penstock.wire.messages import Delta, Fault

TOO_LONG = "context_length_exceeded"
_TWELVE_HOURS = 43_200.0
"""The code of a prompt that does not fit. Codex then offers to compact the chat; it shows any other error as it is."""


class ResponseDialect(Dialect):
    """Renders one response, whole or as a stream. `response` has what repeats the request; its status and end are set here.

    `snapshot` is the Response object at any time. After the last event, or the body, it is final.
    """

    def __init__(
        self,
        response: ResponseObject,
        token_bytes: Callable[[int], bytes],
        tools: Mapping[str, CalledTool] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.id = response.id
        self._response = response
        self._events = Events()
        self._output = OutputItems(self._events, tools or {})
        self._token_bytes = token_bytes
        self._clock = clock
        self._ending: Ending | None = None
        self._is_created = False
        self._has_begun = False

    @property
    def is_over(self) -> bool:
        return not self._response.is_running

    @property
    def output(self) -> list[Item]:
        return self._output.items

    def snapshot(self) -> ResponseObject:
        return msgspec.structs.replace(self._response, output=self.output)

    def logprobs(self, index: int, delta: Delta, tokens: int) -> object:  # noqa: ARG002
        return token_logprobs(self._token_bytes, delta, tokens)

    def queue(self) -> bytes:
        """The first events of a background response, before it runs."""
        self._is_created = True
        return self._lifecycle("created") + self._lifecycle("queued")

    def announce(self) -> bytes:
        self._has_begun = True
        self._response.status = "in_progress"
        created = b"" if self._is_created else self._lifecycle("created")
        return created + self._lifecycle("in_progress")

    def keep_alive(self) -> bytes:
        """The last event again, `response.in_progress`, without what may be long. After any output, a comment.

        Codex gives up after minutes without an event, and comments are none. No other event is known to all clients. It has
        the number of the event that it repeats, so a client that resumes the stream misses nothing.
        """
        if self.output or not self._has_begun:
            return KEEP_ALIVE
        short = msgspec.structs.replace(
            self._response, instructions=None, tools=[], tool_choice="auto", text={}, metadata={}, user=None, safety_identifier=None
        )
        return encoded_event("response.in_progress", self._events.count - 1, {"response": short})

    def begin(self, usage: Usage) -> bytes:  # noqa: ARG002, reported at the end
        return b"" if self._has_begun else self.announce()

    def event(self, index: int, added: ChoiceDelta) -> bytes:  # noqa: ARG002, there is one choice
        events: list[bytes] = []
        self._output.logprobs.note(cast(Sequence[Item], added.logprobs or ()))
        for part in added.parts:
            events += self._output.add(part)
        if added.ending is not None:
            events += self._finish_items(added.ending)
        if added.nvext is not None:
            self._response.nvext = added.nvext
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        self._conclude(usage)
        return self._lifecycle("completed" if self._response.status == "completed" else "incomplete")

    def fault(self, fault: Fault) -> bytes:
        return self.fail(GenerationFault(fault))

    def last_fault(self, fault: Fault, number: int) -> bytes:
        self._events.count = number
        self._response.completed_at = None
        self._response.status = "failed"
        self._response.error = _failure(GenerationFault(fault))
        return self._lifecycle("failed")

    def fail(self, error: GenerationFault | RequestError) -> bytes:
        """The last events of a response that fails."""
        events = self._give_up()
        self._response.status = "failed"
        self._response.error = _failure(error)
        return events + self._lifecycle("failed")

    def refuse(self, error: GenerationFault | RequestError) -> bytes:
        """A stream that says only why there is no answer. It is not stored."""
        self._response.store = False
        self._response.status = "in_progress"
        return self._lifecycle("created") + self.fail(error)

    def cancel(self) -> bytes:
        """The last events of a response that is stopped. The API has no event for that; it is `incomplete`."""
        events = self._give_up()
        self._response.status = "cancelled"
        return events + self._lifecycle("incomplete")

    def fail_instead(self, events: bytes, error: RequestError) -> bytes:
        """The same events, except the last one: it says that the response failed."""
        self._events.take_back()
        self._response.completed_at = None
        # An empty line ends an event and never appears inside one.
        before = events.removesuffix(b"\n\n").rpartition(b"\n\n")[0]
        return (before + b"\n\n" if before else b"") + self.fail(error)

    def body(self, answers: Sequence[Answer], usage: Usage, nvext: dict[str, object] | None) -> Iterator[bytes]:
        (answer,) = answers
        for entries in answer.logprobs:
            self._output.logprobs.note(cast(Sequence[Item], entries))
        for part in without_broken_calls(answer.parts):
            self._output.add(part)
        self._finish_items(answer.ending)
        if nvext is not None:
            self._response.nvext = nvext
        self._conclude(usage)
        yield msgspec.json.encode(self.snapshot())

    def _give_up(self) -> bytes:
        """Closes the open items."""
        return b"".join(self._output.finish("incomplete")) if self.output else b""

    def _finish_items(self, ending: Ending) -> list[bytes]:
        self._ending = ending
        return self._output.finish("completed" if _is_complete(ending) else "incomplete")

    def _conclude(self, usage: Usage) -> None:
        ending = self._ending
        if ending is None or _is_complete(ending):
            self._response.status = "completed"
            self._response.completed_at = int(self._clock())
        elif ending.reason == "length":
            self._response.status = "incomplete"
            self._response.incomplete_details = IncompleteDetails("max_output_tokens")
        else:
            self._response.status = "cancelled"
        self._response.usage = _usage(usage)

    def _lifecycle(self, kind: str) -> bytes:
        return self._events.event(f"response.{kind}", {"response": self.snapshot()})


def _is_complete(ending: Ending) -> bool:
    return ending.reason in ("stop", "tool_calls")


def _usage(usage: Usage) -> ResponseUsage:
    written, long = usage.written_tokens, usage.written_for(_TWELVE_HOURS)
    details = CacheWriteTokensDetails(written - long, long) if written else None
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens, written, details),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ReasoningTokensDetails(usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )


def _failure(error: GenerationFault | RequestError) -> ResponseFailure:
    status = error.status if isinstance(error, RequestError) else fault_status(error.fault)
    code, message = (error.code, error.message) if isinstance(error, RequestError) else (error.fault.code, error.fault.message)
    if code == TOO_LONG:
        return ResponseFailure(code, message)
    kind = "rate_limit_exceeded" if status == 429 else "invalid_prompt" if status < 500 else "server_error"
    return ResponseFailure(kind, f"{code}: {message}")
