"""A generation as SGLang is asked for it."""

from __future__ import annotations

import random
import re
from typing import Any

from penstock.backends.external.engine import EngineRequest
from penstock.backends.sglang.sessions import Turn

RETAINED_PRIORITY = 1 << 20
"""What KV that is to be kept has before other KV. Those that a client may give are far below it."""

MOST_PRIORITY = 1 << 62
_IS_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:)")


def as_parameters(request: EngineRequest, turn: Turn | None, *, tags_sessions: bool, has_priority: bool) -> dict[str, Any]:
    """The arguments of `Engine.async_generate`. `turn` is given where the engine has the story of the session already."""
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
    if has_priority:
        parameters["priority"] = engine_priority(request)
    if request.bootstrap is not None:
        parameters["bootstrap_host"] = request.bootstrap.host
        parameters["bootstrap_port"] = request.bootstrap.port
        parameters["bootstrap_room"] = request.bootstrap.room
    return parameters


def sampling_parameters(request: EngineRequest) -> dict[str, Any]:
    """SGLang's own defaults are not relied on. A seed counts only where it was started with --enable-deterministic-inference."""
    sampling = request.sampling
    parameters: dict[str, Any] = {
        "max_new_tokens": request.max_tokens,
        # What a grammar allows may be an end alone.
        "min_new_tokens": 0 if request.lark is not None else request.min_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": request.ignore_eos,
        # Where it heeds them, all that come without one have the same.
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
    """SGLang tells Lark from the other dialect of its `ebnf` by how a line begins; one that it would take for the other is marked."""
    return lark if _IS_LARK.search(lark) else "%llguidance {}\n" + lark


def engine_priority(request: EngineRequest) -> int:
    """With SGLang's eviction by priority, what has the lower goes first. It must fit into 64 bits."""
    wanted = request.priority + (RETAINED_PRIORITY if request.is_retained else 0)
    return max(-MOST_PRIORITY, min(MOST_PRIORITY, wanted))
