"""The fields of an SGLang request, and how SGLang's chunks are read."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import structs

from penstock.backends.external.engine import Chunk, EngineRefused, EngineRequest, PromptImages
from penstock.backends.external.handover import HandoverFailed
from penstock.backends.external.images import mismatch
from penstock.backends.sglang.sessions import Turn
from penstock.wire.address import TcpAddress, parse_address
from penstock.wire.messages import Fault, FinishReason, TokenLogprob

PriorityUse = Literal["none", "eviction", "scheduling"]
"""What SGLang does with priorities. "eviction": KV with the lowest leaves first. "scheduling": its queue is in their order, too."""

PRIORITY_SECONDS = 600
"""What one step of a client's priority is worth: KV counts as used this much later than it was."""

MAX_PRIORITY = 1 << 62
MAX_ROOM = 2**63 - 1
BAD_REQUEST = 400
_IS_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:)")

# SGLang's form of a logprob: the value, the token, and its text, which is not requested.
Entry = tuple[float | None, int, str | None]


def as_parameters(request: EngineRequest, turn: Turn | None, *, tags_sessions: bool, priority: PriorityUse) -> dict[str, Any]:
    """The arguments of `Engine.async_generate`. With a `turn`, the engine already has the earlier tokens of the session."""
    parameters: dict[str, Any] = {
        "input_ids": list(request.token_ids if turn is None else turn.new),
        "sampling_params": sampling_parameters(request),
        "rid": request.id,
        "stream": True,
    }
    if request.logprobs is not None or request.prompt_logprobs:
        parameters["return_logprob"] = True
        parameters["top_logprobs_num"] = request.logprobs or 0
        parameters["logprob_start_len"] = 0 if request.prompt_logprobs else -1
    if turn is not None:
        parameters["session_params"] = {"id": request.session_id}
    elif tags_sessions and request.session_id is not None:
        parameters["session_id"] = request.session_id
    if request.salt is not None:
        parameters["cache_salt"] = request.salt
    if priority == "scheduling":
        parameters["priority"] = _bounded(request.priority)
    elif priority == "eviction":
        parameters["priority"] = kept_until(request, time.time(), tags_sessions=tags_sessions)
    return parameters


def image_parameters(images: PromptImages, pictures: Sequence[Any]) -> dict[str, Any]:
    """The arguments that a prompt with images has besides, or instead. `pictures`: each of them as SGLang takes it here.

    SGLang names them by a hash of mode, size and pixels. With hashes of ours in `mm_hashes`, 0.5.23 does not find Qwen's images in the
    prompt, and its scheduler ends.
    """
    return {"input_ids": list(images.token_ids), "image_data": list(pictures)}


def meeting_parameters(request: EngineRequest, own_address: str) -> dict[str, Any]:
    """The arguments by which two engines find each other: the address of the one that computes the prompt, and a number that both know.

    Raises HandoverFailed for an address that is none.
    """
    if request.export is not None:
        transfer, text = request.export.transfer, own_address
    elif request.source is not None:
        transfer, text = request.source.transfer, request.source.address
    else:
        return {}
    try:
        address = parse_address(text)
    except ValueError as error:
        raise HandoverFailed(f"the prefill worker's address is {text!r}: {error}") from error
    if not isinstance(address, TcpAddress):
        raise HandoverFailed(f"the prefill worker's address is {text!r}: expected tcp://host:port")
    room = int.from_bytes(transfer[:8], "big") & MAX_ROOM
    return {"bootstrap_host": address.host, "bootstrap_port": address.port, "bootstrap_room": room}


def sampling_parameters(request: EngineRequest) -> dict[str, Any]:
    """Every value is sent: SGLang's defaults are not used. Seeds work only with --enable-deterministic-inference."""
    parameters: dict[str, Any] = structs.asdict(request.sampling) | {
        "top_k": request.sampling.top_k or -1,
        "max_new_tokens": request.max_tokens,
        # A grammar may allow nothing but the end.
        "min_new_tokens": 0 if request.lark is not None else request.min_tokens,
        "ignore_eos": request.ignore_eos,
        # Without one, SGLang uses the same seed for all requests.
        "sampling_seed": random.getrandbits(63) if request.seed is None else request.seed,
    }
    if request.stop_ids:
        parameters["stop_token_ids"] = list(request.stop_ids)
    if request.logit_bias:
        parameters["logit_bias"] = {str(token): bias for token, bias in request.logit_bias}
    if request.lark is not None:
        parameters["ebnf"] = as_ebnf(request.lark)
    return parameters


def as_ebnf(lark: str) -> str:
    """SGLang tells Lark from the other syntax of its `ebnf` field by how lines begin. Adds a mark if it would not see that it is Lark."""
    return lark if _IS_LARK.search(lark) else "%llguidance {}\n" + lark


def kept_until(request: EngineRequest, now: float, *, tags_sessions: bool) -> int:
    """The priority of the KV: a time of day in milliseconds.

    SGLang evicts the KV with the lowest priority first, and KV keeps the highest priority that it ever had. A time makes it age. With any
    other number, KV that somebody asked to keep would be in the way of all later prompts long after that. And SGLang adds one to the
    priority of a prompt whose answer fills a page: a millisecond.

    `tags_sessions`: SGLang knows which KV belongs to an open session, and evicts it last of all. It needs no time besides.
    """
    seconds = max(request.keep_seconds, 0.0 if tags_sessions else request.session_seconds)
    return _bounded(int((now + seconds) * 1000) + request.priority * PRIORITY_SECONDS * 1000)


def priority_use(arguments: Mapping[str, Any]) -> PriorityUse:
    """`arguments`: what SGLang says of its start."""
    if arguments.get("enable_priority_scheduling"):
        return "scheduling"
    return "eviction" if arguments.get("radix_eviction_policy") == "priority" else "none"


def _bounded(priority: int) -> int:
    """SGLang keeps priorities in 64 bits."""
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, priority))


class ChunkReader:
    """Reads the chunks of one generation. A chunk has only the new tokens (incremental), or all tokens so far (cumulative).

    Every chunk also has the number of tokens so far. If SGLang uses the other mode, or loses a token, that number shows it, at the second
    chunk at the latest. The generation then ends with a fault; what was read before is right.

    The tokens of an aborted chunk are not read: they may be repeated or invented, and the usage may be missing.
    """

    def __init__(self, request: EngineRequest, *, is_incremental: bool) -> None:
        self._request = request
        self._is_incremental = is_incremental
        self._count = 0
        self._last_token: int | None = None
        self._owes_prompt_logprobs = request.prompt_logprobs
        # With `ignore_eos` SGLang ignores the stop ids, too.
        self._own_stops = frozenset(request.stop_ids) if request.ignore_eos else frozenset()

    def read(self, raw: Mapping[str, Any]) -> Chunk:
        """The new part. Raises EngineRefused at an abort, and for chunks that do not fit the mode."""
        meta = raw["meta_info"]
        finish = None if meta["finish_reason"] is None else _finish(meta["finish_reason"])
        token_ids = self._new_tokens(raw["output_ids"])
        first, self._count = self._count, self._count + len(token_ids)
        self._check_count(meta, finish)
        self._check_prompt(meta)
        chunk = Chunk(token_ids, self._logprobs(meta, first, token_ids), finish, meta.get("cached_tokens"), self._prompt_logprobs(meta))
        return chunk if not self._own_stops else self._stopped(chunk)

    def _new_tokens(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Raises if a cumulative chunk is shorter than an earlier one, or has another token in the place of the last one."""
        if self._is_incremental:
            return tuple(token_ids)
        count = self._count
        if len(token_ids) < count:
            raise _breach(f"a cumulative chunk of {len(token_ids)} tokens came after one of {count}")
        if count and token_ids[count - 1] != self._last_token:
            raise _breach(f"a cumulative chunk has token {token_ids[count - 1]} where {self._last_token} came before")
        # A copy: the engine may append to its list.
        new = tuple(token_ids[count:])
        if new:
            self._last_token = new[-1]
        return new

    def _check_count(self, meta: Mapping[str, Any], finish: FinishReason | None) -> None:
        """A cumulative chunk holds SGLang's own list, which may have grown since it was counted, except at the end."""
        announced = meta["completion_tokens"]
        is_exact = self._is_incremental or finish is not None
        if self._count != announced if is_exact else self._count < announced:
            mode = "incremental" if self._is_incremental else "cumulative"
            raise _breach(f"its {mode} chunks have {self._count} tokens, but it reports {announced}")
        if finish == "length" and self._count < self._request.max_tokens:
            raise _breach(f"it ended for length after {self._count} of {self._request.max_tokens} tokens")

    def _check_prompt(self, meta: Mapping[str, Any]) -> None:
        """SGLang must have expanded the placeholders of images to as many tokens as we did."""
        expected = len(self._request.token_ids)
        if self._request.images is not None and meta.get("prompt_tokens", expected) != expected:
            raise mismatch("SGLang", meta["prompt_tokens"], expected)

    def _logprobs(self, meta: Mapping[str, Any], first: int, token_ids: tuple[int, ...]) -> tuple[TokenLogprob, ...] | None:
        if self._request.logprobs is None:
            return None
        # Incremental chunks have only the logprobs of their own tokens.
        start = 0 if self._is_incremental else first
        entries: Sequence[Entry] = meta["output_token_logprobs"][start : start + len(token_ids)]
        tops = meta["output_top_logprobs"][start : start + len(token_ids)] if self._request.logprobs else [()] * len(token_ids)
        if [entry[1] for entry in entries] != list(token_ids) or len(tops) != len(token_ids):
            raise _breach(f"its {len(entries)} logprobs do not fit the {len(token_ids)} new tokens")
        return tuple(_token_logprob(entry, top) for entry, top in zip(entries, tops, strict=True))

    def _prompt_logprobs(self, meta: Mapping[str, Any]) -> tuple[TokenLogprob | None, ...] | None:
        entries: Sequence[Entry] = meta.get("input_token_logprobs") or ()
        if not self._owes_prompt_logprobs or not entries:
            return None
        self._owes_prompt_logprobs = False
        tops = meta["input_top_logprobs"] if self._request.logprobs else [()] * len(entries)
        expected = len(self._request.token_ids)
        if len(entries) != expected or len(tops) != expected:
            raise _breach(f"it has {len(entries)} logprobs for a prompt of {expected} tokens")
        return (None, *(_token_logprob(entry, top) for entry, top in zip(entries[1:], tops[1:], strict=True)))

    def _stopped(self, chunk: Chunk) -> Chunk:
        """The chunk up to the first stop token, if it has one."""
        for index, token in enumerate(chunk.token_ids):
            if token in self._own_stops:
                end = index + 1
                logprobs = None if chunk.logprobs is None else chunk.logprobs[:end]
                return Chunk(chunk.token_ids[:end], logprobs, "stop", chunk.cached_tokens, chunk.prompt_logprobs)
        return chunk


def refusal_of(finish: Mapping[str, Any]) -> Fault:
    """The fault for an abort. A mistake in the request is final; everything else can be retried on another worker."""
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
            raise _breach(f"it ended for an unknown reason: {other}")


def _token_logprob(entry: Entry, top: Sequence[Entry] | None) -> TokenLogprob:
    assert entry[0] is not None
    return TokenLogprob(entry[0], tuple((token, value) for value, token, _ in top or () if value is not None))


def _breach(what: str) -> EngineRefused:
    return EngineRefused(Fault("stream_breach", f"SGLang's output contradicts itself: {what}"))
