"""The sampling parameters of a vLLM request, and what vLLM answers, as our own types. Pure: vLLM is not imported here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from msgspec import structs

from penstock.backends.external.engine import Chunk, EngineRefused, EngineRequest
from penstock.backends.external.images import mismatch
from penstock.backends.vllm.handover import ticket_of
from penstock.wire.messages import Fault, FinishReason, TokenLogprob

FINISHES: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "repetition": "stop"}
"""Normal ends of a request. The others are `abort` and `error`."""


def sampling_arguments(request: EngineRequest) -> dict[str, Any]:
    """The arguments of vLLM's SamplingParams that depend on the request."""
    arguments: dict[str, Any] = structs.asdict(request.sampling) | {
        "max_tokens": request.max_tokens,
        # After the end of a grammar only the end token is allowed.
        "ignore_eos": request.ignore_eos and request.lark is None,
    }
    if request.sampling.temperature == 0:
        # Greedy sampling needs none of these, and no seed.
        for name in ("top_p", "top_k", "min_p"):
            del arguments[name]
    elif request.seed is not None:
        arguments["seed"] = request.seed
    if request.lark is None:
        # A grammar may allow nothing but the end.
        arguments["min_tokens"] = min(request.min_tokens, request.max_tokens)
    if request.stop_ids:
        arguments["stop_token_ids"] = list(request.stop_ids)
    if request.logit_bias:
        arguments["logit_bias"] = dict(request.logit_bias)
    if request.logprobs is not None:
        arguments["logprobs"] = request.logprobs
    if request.prompt_logprobs:
        arguments["prompt_logprobs"] = request.logprobs or 0
    return arguments


def chunk_of(output: Any, top: int | None, lease_seconds: float | None = None) -> Chunk:
    """The new part of a vLLM RequestOutput. `top` is the requested number of alternatives, None without logprobs. `lease_seconds` is set
    for an export.

    The ids are copied: vLLM keeps appending to the list of an output that nobody has read yet.
    """
    completion = output.outputs[0]
    token_ids = tuple(completion.token_ids)
    logprobs = None
    if top is not None:
        logprobs = () if completion.logprobs is None else tuple(entry for entry in _entries(completion.logprobs, top) if entry is not None)
        if len(logprobs) != len(token_ids):
            raise EngineRefused(Fault("engine_error", f"vLLM gave {len(logprobs)} logprobs for {len(token_ids)} tokens"))
    prompt = tuple(_entries(output.prompt_logprobs, top or 0)) if output.prompt_logprobs else None
    ticket = b"" if lease_seconds is None else ticket_of(output, lease_seconds, (time.monotonic(), time.time()))
    return Chunk(token_ids, logprobs, FINISHES.get(completion.finish_reason), output.num_cached_tokens, prompt, ticket)


def check_end(output: Any) -> None:
    """Raises EngineRefused for a request that vLLM gave up by itself. Another worker can continue it."""
    reason = output.outputs[0].finish_reason
    if reason not in FINISHES:
        raise EngineRefused(Fault("engine_aborted", f"vLLM gave up the generation: {reason}", retryable=True))


def check_expanded(output: Any, request: EngineRequest) -> None:
    """Raises EngineRefused if vLLM has expanded the placeholders of images to something else than we did. Every output has the prompt."""
    expanded = tuple(output.prompt_token_ids or ())
    if expanded != request.token_ids:
        raise mismatch("vLLM", len(expanded), len(request.token_ids))


def _entries(flat: Any, top: int) -> Iterator[TokenLogprob | None]:
    """One entry per position of vLLM's FlatLogprobs. None if the position has no logprobs, as the first token of a prompt.

    A position is a range of the table: its own token first, then the `top` most likely ones, which may include the own token again. If
    vLLM merged outputs, the own token is there only once; its rank says where it belongs.
    """
    ids, values = flat.token_ids, flat.logprobs
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        if start == end:
            yield None
            continue
        most_likely = list(zip(ids[start + 1 : end], values[start + 1 : end], strict=True))
        if len(most_likely) < top:
            rank = flat.ranks[start] or 1
            most_likely.insert(rank - 1, (ids[start], values[start]))
        yield TokenLogprob(values[start], tuple(most_likely[:top]))
