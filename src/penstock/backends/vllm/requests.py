"""What vLLM is asked for, and what it answers, in our words. Pure: no vLLM is imported here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from penstock.backends.external.engine import Chunk, EngineRefused, EngineRequest
from penstock.wire.messages import Fault, FinishReason, TokenLogprob

FINISHES: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "repetition": "stop"}
"""How a request ends as it should. There are others: `abort` and `error`."""


class FlatLogprobs(Protocol):
    """vLLM's table of logprobs: from a position's start to its end, its own token first, the likeliest ones behind it."""

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int | None]


class Completion(Protocol):
    token_ids: Any
    logprobs: FlatLogprobs | None
    finish_reason: str | None


class Output(Protocol):
    """What is new of a request, possibly of several steps. Only what is read here."""

    outputs: list[Any]
    num_cached_tokens: int | None
    prompt_logprobs: Any


def sampling_arguments(request: EngineRequest) -> dict[str, Any]:
    """The arguments of vLLM's SamplingParams, but for those that are the same for all requests."""
    sampling = request.sampling
    arguments: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_tokens": request.max_tokens,
        # Where a grammar ends there is nothing to go on with but its own end.
        "ignore_eos": request.ignore_eos and request.lark is None,
    }
    if sampling.temperature > 0:
        # Greedy ones need none of it.
        arguments |= {
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
        }
        if request.seed is not None:
            arguments["seed"] = request.seed
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        arguments[name] = getattr(sampling, name)
    if request.lark is None:
        # What a grammar allows may be an end alone.
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


def chunk_of(output: Output, top: int | None) -> Chunk:
    """What an output says. `top` is how many alternatives were asked for, None without logprobs.

    The ids are copied: vLLM goes on growing the list of an output that nobody has taken yet.
    """
    completion: Completion = output.outputs[0]
    token_ids = tuple(completion.token_ids)
    logprobs = None
    if top is not None:
        logprobs = () if completion.logprobs is None else tuple(_sampled(completion.logprobs, top))
        if len(logprobs) != len(token_ids):
            raise EngineRefused(Fault("engine_error", f"vLLM gave {len(logprobs)} logprobs for {len(token_ids)} tokens"))
    prompt = None
    if output.prompt_logprobs:
        prompt = tuple(_entries(output.prompt_logprobs, top or 0))
    return Chunk(token_ids, logprobs, FINISHES.get(completion.finish_reason), output.num_cached_tokens, prompt)


def check_end(output: Output) -> None:
    """Raises EngineRefused for a request that vLLM ended by itself, though nobody asked for it. Another worker can go on from there."""
    reason = output.outputs[0].finish_reason
    if reason not in FINISHES:
        raise EngineRefused(Fault("engine_aborted", f"vLLM has given up the generation: {reason}", retryable=True))


def _sampled(flat: FlatLogprobs, top: int) -> Iterator[TokenLogprob]:
    for entry in _entries(flat, top):
        assert entry is not None
        yield entry


def _entries(flat: FlatLogprobs, top: int) -> Iterator[TokenLogprob | None]:
    """One a position, None where nothing is known of it, which is so for a prompt's first token.

    A position has its own token first and the `top` likeliest behind it, among which it may be again. Where vLLM has merged outputs,
    it is there only once, and goes to where its rank says.
    """
    ids, values = flat.token_ids, flat.logprobs
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        if start == end:
            yield None
            continue
        likeliest = list(zip(ids[start + 1 : end], values[start + 1 : end], strict=True))
        if len(likeliest) < top:
            rank = flat.ranks[start] or 1
            likeliest.insert(rank - 1, (ids[start], values[start]))
        yield TokenLogprob(values[start], tuple(likeliest[:top]))
