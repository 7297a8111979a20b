"""Rotary frequencies: how fast each pair of a head turns with the position, for any length that is asked for.

A model's own scaling holds up to `covered_length`. Whoever asks for more gets YaRN, with a factor that follows from both
lengths:

| kind          | own scaling holds to                        | beyond it                                                          |
|---------------|---------------------------------------------|--------------------------------------------------------------------|
| default       | the trained length                          | YaRN, factor = asked / trained                                     |
| linear        | the trained length, or original × factor    | YaRN over the model's linear frequencies, factor = asked / covered |
| llama3        | the trained length                          | YaRN over the model's llama3 frequencies, factor = asked / covered |
| yarn          | the trained length, or original × factor    | the same YaRN with a larger factor = asked / original              |

For linear and yarn it is the larger of the two: some configs state the extended length, others the original one. Linear
and llama3 are stretched from the frequencies that the model was trained with, not from those that it never saw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from penstock.engine.shape import ModelShape, RopeScaling


def covered_length(shape: ModelShape) -> int:
    """The longest context for which the model's own frequencies are meant."""
    if shape.rope.kind in ("linear", "yarn"):
        return max(shape.trained_length, int(_original_length(shape) * shape.rope.factor))
    return shape.trained_length


def rotary_frequencies(shape: ModelShape, context_length: int) -> tuple[torch.Tensor, float]:
    """The inverse frequencies, float32 [head_dim / 2], and what multiplies cosine and sine."""
    covered = covered_length(shape)
    scaling = shape.rope
    plain = [shape.rope_theta ** (-2 * pair / shape.head_dim) for pair in range(shape.head_dim // 2)]
    if scaling.kind == "yarn":
        original = _original_length(shape)
        factor = scaling.factor if context_length <= covered else context_length / original
        frequencies, attention = _yarn(plain, original, replace(scaling, factor=factor))
    else:
        frequencies, attention = _trained_frequencies(shape, plain), 1.0
        if context_length > covered:
            frequencies, attention = _yarn(frequencies, covered, RopeScaling("yarn", factor=context_length / covered))
    return torch.tensor(frequencies, dtype=torch.float32), attention


def _original_length(shape: ModelShape) -> int:
    return shape.rope.original_length or shape.trained_length


def _trained_frequencies(shape: ModelShape, plain: Sequence[float]) -> list[float]:
    scaling = shape.rope
    if scaling.divisors:
        return [frequency / divisor for frequency, divisor in zip(plain, scaling.divisors, strict=True)]
    match scaling.kind:
        case "linear":
            return [frequency / scaling.factor for frequency in plain]
        case "llama3":
            return [_llama3(frequency, _original_length(shape), scaling) for frequency in plain]
        case _:
            return list(plain)


def _llama3(frequency: float, original_length: int, scaling: RopeScaling) -> float:
    """Slow turns are divided by the factor, fast ones kept, with a ramp between them."""
    turns = original_length * frequency / (2 * math.pi)
    kept = _clamp((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor))
    return frequency * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Sequence[float], length: int, scaling: RopeScaling) -> tuple[list[float], float]:
    """Pairs that turn more than `beta_fast` times in `length` are kept, those below `beta_slow` divided by the factor."""
    low = _pair_turning(frequencies, length, scaling.beta_fast)
    high = _pair_turning(frequencies, length, scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The upper bound counts dimensions, not pairs: so did YaRN's authors, and models are trained with it.
    low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
    width = max(high - low, 0.001)
    divided = [_clamp((pair - low) / width) for pair in range(len(frequencies))]
    stretched = [frequency * (1 - part + part / scaling.factor) for frequency, part in zip(frequencies, divided, strict=True)]
    return stretched, _attention_scaling(scaling)


def _pair_turning(frequencies: Sequence[float], length: int, turns: float) -> float:
    """The index, with its fraction, of the pair that turns so often in `length`; beyond the ends as the ends slope."""
    logarithms = [math.log(frequency) for frequency in frequencies]
    wanted = math.log(2 * math.pi * turns / length)
    last = len(logarithms) - 2
    left = next((pair for pair in range(last) if logarithms[pair + 1] <= wanted), last)
    return left + (logarithms[left] - wanted) / (logarithms[left] - logarithms[left + 1])


def _attention_scaling(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _magnitude(scaling.factor, scaling.mscale) / _magnitude(scaling.factor, scaling.mscale_all_dim)
    return _magnitude(scaling.factor, 1.0)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _clamp(value: float) -> float:
    return min(max(value, 0.0), 1.0)
