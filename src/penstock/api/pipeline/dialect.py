"""How an answer is rendered, and what OpenAI's chats and completions share."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import msgspec
from msgspec import Struct

from penstock.api.errors import fault_body
from penstock.api.pipeline.plan import Plan
from penstock.api.pipeline.response import KEEP_ALIVE
from penstock.text.output import Part
from penstock.wire.messages import Delta, Fault, Mark

DONE = b"data: [DONE]\n\n"


class Usage(Struct, frozen=True, gc=False):
    """`reasoning_tokens` are part of `completion_tokens`, `cached_tokens` of `prompt_tokens`. So is `written`: other tokens, which are kept
    now for a time that the client asked for."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    written: tuple[Mark, ...] = ()

    @property
    def written_tokens(self) -> int:
        return sum([mark.tokens for mark in self.written])

    def written_for(self, seconds: float) -> int:
        """The tokens that are kept for at least this long."""
        return sum([mark.tokens for mark in self.written if mark.seconds >= seconds])

    def fields(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": self.written_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


class Ending(NamedTuple):
    """Why a choice ended: `stop`, `length`, `cancelled`, or `tool_calls` when it called a tool; and the stop string that ended it."""

    reason: str
    stop: str | None = None


class ChoiceDelta(NamedTuple):
    """What an arrival adds to a choice. `token_ids` and `usage` are set only if the client asked for them. `nvext`, which goes beyond
    the API, is set only with the last delta of a stream."""

    parts: Sequence[Part]
    logprobs: object = None
    ending: Ending | None = None
    token_ids: Sequence[int] | None = None
    usage: Usage | None = None
    nvext: dict[str, object] | None = None


class Answer(Struct, frozen=True, gc=False):
    """A whole choice: its parts joined, what was kept of its logprobs, piece by piece, and its tokens if the client asked for them."""

    parts: Sequence[Part]
    logprobs: Sequence[object]
    ending: Ending
    token_ids: Sequence[int] | None = None


class Dialect(Protocol):
    """Renders one request's answer, streamed (`announce` if late, `begin`, `event`s, then `end` or `fault`) or whole (`body`).

    It lives as long as the request and may keep state. Every event ends with an empty line and contains none.
    """

    id: str
    """The answer's id, as its client sees it."""

    def opening(self, index: int) -> str:  # noqa: ARG002
        """The text that a choice starts with before anything is generated: the prompt, if it is echoed."""
        return ""

    def logprobs(self, index: int, delta: Delta, tokens: int) -> object:  # noqa: ARG002
        """The logprobs of the delta's first `tokens` tokens, in the API's shape; None if there are none."""
        return None

    def announce(self) -> bytes:
        """The events before the first token, if that takes long. `begin` does not repeat them."""
        return b""

    def keep_alive(self) -> bytes:
        """What is sent while there is nothing to send. It is no part of the answer, and is not recorded."""
        return KEEP_ALIVE

    def begin(self, usage: Usage) -> bytes:  # noqa: ARG002
        """The first events. The usage is that of the prompt."""
        return b""

    def event(self, index: int, added: ChoiceDelta) -> bytes:
        """The events for what is new in a choice. The last delta has an ending."""

    def end(self, usage: Usage) -> bytes:
        """The last events."""

    def fault(self, fault: Fault) -> bytes:
        """The event that says why the stream breaks off."""

    def last_fault(self, fault: Fault, number: int) -> bytes:  # noqa: ARG002
        """`fault` as event `number` of a recording, whatever was rendered since the event before it."""
        return self.fault(fault)

    def kept_logprobs(self, logprobs: object) -> object:
        """What is kept of logprobs until `body` is called."""
        return logprobs

    def body(self, answers: Sequence[Answer], usage: Usage, nvext: dict[str, object] | None) -> Iterator[bytes]:
        """The whole answer, in pieces. None takes longer than a few milliseconds, unless a text is very long."""


def token_logprobs(token_bytes: Callable[[int], bytes], delta: Delta, tokens: int) -> list[dict[str, Any]] | None:
    """The logprobs of the delta's first `tokens` tokens, as OpenAI's chats and responses show them."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        piece = token_bytes(token_id)
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}

    if delta.logprobs is None:
        return None
    chosen = zip(delta.token_ids[:tokens], delta.logprobs[:tokens], strict=True)
    return [{**shown(token, entry.logprob), "top_logprobs": [shown(*other) for other in entry.top]} for token, entry in chosen]


class OpenAIDialect(Dialect):
    """The fields around the choices. The frame of an event is encoded once per request; an event then encodes only its text."""

    def __init__(self, prefix: str, kind: str, plan: Plan) -> None:
        self.id = f"{prefix}-{plan.response_id}"
        self._tokenizer = plan.model.tokenizer
        self._fields: dict[str, object] = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": plan.model.info.name,
        }
        request = plan.request
        if request.service_tier is not None:
            # There is only one tier.
            self._fields["service_tier"] = "default"
        self._grammar_field = plan.grammar_field
        self._includes_usage = request.include_usage
        self._opening = b"data: " + msgspec.json.encode(self._fields)[:-1] + b',"choices":[{"index":'
        self._usage = b',"usage":null' if self._includes_usage else b""
        self._plain_closing = b',"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"
        # The first event of a choice has the tokens of its prompt.
        self._prompts = plan.choice_prompts if request.return_token_ids else None
        self._has_prompt: set[int] = set()

    @abstractmethod
    def _content(self, parts: Sequence[Part]) -> dict[str, object]:
        """The members of a whole choice that hold its text."""

    def _framed(self, index: int, content: bytes, added: ChoiceDelta) -> bytes:
        """One event. `content` is the encoded member that holds the text, after a comma."""
        opening = b"%b%d%b" % (self._opening, index, content)
        logprobs, ending, token_ids, usage, nvext = added[1:]
        if logprobs is None and ending is None and token_ids is None and usage is None:
            return opening + self._plain_closing
        finish_reason = None if ending is None else ending.reason
        rest = [b',"logprobs":', msgspec.json.encode(logprobs), b',"finish_reason":', msgspec.json.encode(finish_reason)]
        if token_ids is not None:
            rest += (b',"token_ids":', msgspec.json.encode(token_ids))
        rest += (b"}]", self._usage if usage is None else b',"usage":' + msgspec.json.encode(usage.fields()))
        if nvext is not None:
            rest += (b',"nvext":', msgspec.json.encode(nvext))
        if self._prompts is not None and index not in self._has_prompt:
            self._has_prompt.add(index)
            rest += (b',"prompt_token_ids":', msgspec.json.encode(self._prompts[index]))
        return b"".join([opening, *rest, b"}\n\n"])

    def end(self, usage: Usage) -> bytes:
        if not self._includes_usage:
            return DONE
        return b"data: " + msgspec.json.encode({**self._fields, "choices": [], "usage": usage.fields()}) + b"\n\n" + DONE

    def fault(self, fault: Fault) -> bytes:
        return b"data: " + fault_body(fault, self._grammar_field) + b"\n\n"

    def kept_logprobs(self, logprobs: object) -> object:
        """Each list as JSON without its brackets: it takes less memory than its objects, and the end of the answer less time."""
        lists = cast(dict[str, list[object] | None], logprobs)
        return {name: None if values is None else msgspec.json.encode(values)[1:-1] for name, values in lists.items()}

    def body(self, answers: Sequence[Answer], usage: Usage, nvext: dict[str, object] | None) -> Iterator[bytes]:
        kind = str(self._fields["object"]).removesuffix(".chunk")
        yield msgspec.json.encode({**self._fields, "object": kind})[:-1] + b',"choices":['
        encoded: dict[int, bytes] = {}
        if self._prompts is not None:
            # The choices of a prompt share it.
            encoded = {id(prompt): msgspec.json.encode(prompt) for prompt in {id(prompt): prompt for prompt in self._prompts}.values()}
        for index, answer in enumerate(answers):
            yield (b"," if index else b"") + msgspec.json.encode({"index": index, **self._content(answer.parts)})[:-1] + b',"logprobs":'
            yield from _joined(cast(Sequence[Mapping[str, bytes | None]], answer.logprobs))
            yield b',"finish_reason":' + msgspec.json.encode(answer.ending.reason)
            if answer.token_ids is not None:
                yield b',"token_ids":' + msgspec.json.encode(answer.token_ids)
            if self._prompts is not None:
                yield b',"prompt_token_ids":'
                yield encoded[id(self._prompts[index])]
            yield b"}"
        yield b'],"usage":' + msgspec.json.encode(usage.fields())
        if self._prompts is not None:
            yield b',"prompt_token_ids":'
            yield encoded[id(self._prompts[0])]
        yield b"}" if nvext is None else b',"nvext":' + msgspec.json.encode(nvext) + b"}"


def _joined(pieces: Sequence[Mapping[str, bytes | None]]) -> Iterator[bytes]:
    """Logprobs that were kept in pieces, as one object."""
    if not pieces:
        yield b"null"
        return
    for number, (name, first) in enumerate(pieces[0].items()):
        yield (b"," if number else b"{") + msgspec.json.encode(name) + b":"
        if first is None:
            yield b"null"
            continue
        separator = b"["
        for piece in pieces:
            if values := piece[name]:
                yield separator
                yield values
                separator = b","
        yield b"[]" if separator == b"[" else b"]"
    yield b"}"
