"""What SGLang says of one generation, chunk by chunk: made disjoint, counted, and never trusted at an abort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.backends.external.engine import Chunk, EngineRefused, EngineRequest
from penstock.wire.messages import Fault, FinishReason, TokenLogprob

BAD_REQUEST = 400

# How SGLang writes a logprob: the value, the token, and its text, which is not asked for.
Entry = tuple[float | None, int, str | None]


class ChunkReader:
    """Reads the chunks of one generation as the engine was told to speak: each with all tokens so far, or each with the new ones only.

    Every chunk says how many tokens there are by then. An engine that speaks otherwise than announced, or loses a token, is caught by
    that count, at its second chunk at the latest; the generation then ends in a fault that says so. What was read before is right.

    Of a chunk that ends in an abort, nothing is read: its tokens may be repeated or made up, and its usage may be missing.
    """

    def __init__(self, request: EngineRequest, *, is_incremental: bool) -> None:
        self._request = request
        self._is_incremental = is_incremental
        self._count = 0
        self._last_token: int | None = None
        self._owes_prompt_logprobs = request.prompt_logprobs
        # SGLang ignores these, too, when it is to ignore the model's own end.
        self._own_stops = frozenset(request.stop_ids) if request.ignore_eos else frozenset()

    def read(self, raw: Mapping[str, Any]) -> Chunk:
        """What is new. Raises EngineRefused at an abort, and where the engine does not speak as announced."""
        meta = raw["meta_info"]
        finish = None if meta["finish_reason"] is None else _finish(meta["finish_reason"])
        token_ids = self._new_tokens(raw["output_ids"])
        first, self._count = self._count, self._count + len(token_ids)
        self._check_count(meta, finish)
        chunk = Chunk(
            token_ids,
            self._logprobs(meta, first, token_ids),
            finish,
            meta.get("cached_tokens"),
            self._prompt_logprobs(meta),
        )
        return chunk if not self._own_stops else self._stopped(chunk)

    def _new_tokens(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Raises when a cumulative chunk is shorter than what was read, or has another token where the last one was."""
        if self._is_incremental:
            return tuple(token_ids)
        count = self._count
        if len(token_ids) < count:
            raise _breach(f"a cumulative chunk of {len(token_ids)} tokens came after one of {count}")
        if count and token_ids[count - 1] != self._last_token:
            raise _breach(f"a cumulative chunk has token {token_ids[count - 1]} where {self._last_token} came before")
        # A copy: the engine may go on growing its list.
        new = tuple(token_ids[count:])
        if new:
            self._last_token = new[-1]
        return new

    def _check_count(self, meta: Mapping[str, Any], finish: FinishReason | None) -> None:
        """A cumulative chunk's list is the engine's own and may have grown since the chunk was counted; at the end it has not."""
        announced = meta["completion_tokens"]
        is_exact = self._is_incremental or finish is not None
        if self._count != announced if is_exact else self._count < announced:
            mode = "incremental" if self._is_incremental else "cumulative"
            raise _breach(f"its {mode} chunks have {self._count} tokens where it has made {announced}")
        if finish == "length" and self._count < self._request.max_tokens:
            raise _breach(f"it ended after {self._count} of {self._request.max_tokens} tokens, for their number")

    def _logprobs(self, meta: Mapping[str, Any], first: int, token_ids: tuple[int, ...]) -> tuple[TokenLogprob, ...] | None:
        if self._request.logprobs is None:
            return None
        # Incremental chunks have those of their own tokens.
        start = 0 if self._is_incremental else first
        entries: Sequence[Entry] = meta["output_token_logprobs"][start : start + len(token_ids)]
        tops = meta["output_top_logprobs"][start : start + len(token_ids)] if self._request.logprobs else [()] * len(token_ids)
        if [entry[1] for entry in entries] != list(token_ids) or len(tops) != len(token_ids):
            raise _breach(f"it has logprobs of {len(entries)} tokens, or of others, for {len(token_ids)} that are new")
        return tuple(_token_logprob(entry, top) for entry, top in zip(entries, tops, strict=True))

    def _prompt_logprobs(self, meta: Mapping[str, Any]) -> tuple[TokenLogprob | None, ...] | None:
        entries: Sequence[Entry] = meta.get("input_token_logprobs") or ()
        if not self._owes_prompt_logprobs or not entries:
            return None
        self._owes_prompt_logprobs = False
        tops = meta["input_top_logprobs"] if self._request.logprobs else [()] * len(entries)
        expected = len(self._request.token_ids)
        if len(entries) != expected or len(tops) != expected:
            raise _breach(f"it has logprobs of {len(entries)} tokens for a prompt of {expected}")
        return (None, *(_token_logprob(entry, top) for entry, top in zip(entries[1:], tops[1:], strict=True)))

    def _stopped(self, chunk: Chunk) -> Chunk:
        """The chunk up to the first token that is to end the text, if there is one."""
        for index, token in enumerate(chunk.token_ids):
            if token in self._own_stops:
                end = index + 1
                logprobs = None if chunk.logprobs is None else chunk.logprobs[:end]
                return Chunk(chunk.token_ids[:end], logprobs, "stop", chunk.cached_tokens, chunk.prompt_logprobs)
        return chunk


def refusal_of(finish: Mapping[str, Any]) -> Fault:
    """What an abort comes to: the request's own mistake stays one elsewhere, everything else can be tried on another worker."""
    message = f"SGLang: {finish.get('message') or 'the generation was aborted'}"
    if finish.get("status_code") != BAD_REQUEST:
        return Fault("engine_aborted", message, retryable=True)
    return Fault("invalid_grammar" if "grammar" in message.lower() else "engine_refused", message)


def _finish(finish: Mapping[str, Any]) -> FinishReason:
    match finish["type"]:
        case "stop":
            return "stop"
        case "length":
            return "length"
        case "abort":
            raise EngineRefused(refusal_of(finish))
        case other:
            raise _breach(f"it ended for a reason that is not known: {other}")


def _token_logprob(entry: Entry, top: Sequence[Entry] | None) -> TokenLogprob:
    assert entry[0] is not None
    return TokenLogprob(entry[0], tuple((token, value) for value, token, _ in top or () if value is not None))


def _breach(what: str) -> EngineRefused:
    return EngineRefused(Fault("stream_breach", f"SGLang does not speak as it announced at its start: {what}"))
