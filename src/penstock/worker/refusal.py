"""Why a generation can never run: the same words whichever engine is asked."""

from __future__ import annotations

import math

from penstock.wire.messages import Fault, Sampling, Submit

# Scores are divided by it, and overflow when it is much smaller.
LEAST_REPETITION = 0.01

_ALLOWED_SAMPLING = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-12, 1.0),
    "top_k": (0, math.inf),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "repetition_penalty": (LEAST_REPETITION, 100.0),
}


def why_not(request: Submit, vocab_size: int, context_length: int) -> Fault | None:
    """What is wrong with a request for a model with such a vocabulary and context; None when nothing is."""
    if not request.token_ids:
        return Fault("empty_prompt", "a prompt needs at least one token")
    if not 0 <= request.offset <= len(request.token_ids):
        return Fault("invalid_offset", f"{request.offset} tokens cannot have been generated, of {len(request.token_ids)}")
    ids = (*request.token_ids, *request.stop_ids, *dict(request.logit_bias))
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            return Fault("invalid_token", f"token id {token} is not of this model: expected 0 to {vocab_size - 1}")
    length = total_length(request)
    if length > context_length:
        return Fault("context_length_exceeded", f"{length:,} tokens do not fit the context of {context_length:,}")
    if wrong := wrong_sampling(request.sampling):
        return Fault("invalid_sampling", wrong)
    return None


def total_length(request: Submit) -> int:
    """The tokens of the prompt and of the longest answer."""
    return len(request.token_ids) + max(0, request.max_tokens - request.offset)


def wrong_sampling(sampling: Sampling) -> str | None:
    """What cannot be sampled by: the field, its value and what would be right."""
    for name, (least, most) in _ALLOWED_SAMPLING.items():
        value = getattr(sampling, name)
        if not least <= value <= most:
            return f"`{name}` is {value}: expected {least:g} to {most:g}"
    return None
