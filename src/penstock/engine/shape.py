"""What a Llama-family decoder looks like: its sizes, its switches, and its rotary frequencies for any context length.

A model's own rotary scaling is valid up to `covered_length`. A longer context gets YaRN, with a factor that follows from both lengths:

| kind          | own scaling is valid up to                  | beyond it                                                          |
|---------------|---------------------------------------------|--------------------------------------------------------------------|
| default       | the trained length                          | YaRN, factor = wanted / trained                                    |
| linear        | the trained length, or original × factor    | YaRN over the model's linear frequencies, factor = wanted / covered |
| llama3        | the trained length                          | YaRN over the model's llama3 frequencies, factor = wanted / covered |
| yarn          | the trained length, or original × factor    | the same YaRN with a larger factor = wanted / original             |

"Or" means the larger of the two: some configurations state the extended length, others the original one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions are stretched beyond the pre-trained length. Names as in Hugging Face's config.

    `original_length` 0: the model's trained length. `attention_factor` None: derived. `divisors`, one per frequency: GGUF's form of
    llama3, instead of its four numbers.
    """

    kind: RopeKind = "default"
    factor: float = 1.0
    original_length: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of one decoder. `sliding_window` None: every layer sees all tokens. `rope_axes`: for each pair of a head, which of
    the three axes of a position turns it; empty: positions have one axis."""

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    trained_length: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope: RopeScaling = field(default_factory=RopeScaling)
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: frozenset[int] = frozenset()
    rope_axes: tuple[int, ...] = ()


def covered_length(shape: ModelShape) -> int:
    """The longest context that the model's own frequencies are made for."""
    if shape.rope.kind in ("linear", "yarn"):
        return max(shape.trained_length, int(_original_length(shape) * shape.rope.factor))
    return shape.trained_length


def rotary_frequencies(shape: ModelShape, context_length: int) -> tuple[torch.Tensor, float]:
    """The inverse frequencies, float32 [head_dim / 2], and the factor for cosine and sine."""
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


def mixed_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """Interleaved M-RoPE: the axes take turns, time, row, column, until a section of rows or columns is used up. The rest is time."""
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(sum(sections)))


def joined_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """Plain M-RoPE: all pairs of an axis are together."""
    return tuple(axis for axis, count in enumerate(sections) for _ in range(count))


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
    """Slow frequencies are divided by the factor, fast ones kept, with a ramp between them."""
    turns = original_length * frequency / (2 * math.pi)
    kept = _clamp((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor))
    return frequency * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Sequence[float], length: int, scaling: RopeScaling) -> tuple[list[float], float]:
    """Pairs that turn more than `beta_fast` times in `length` are kept; those below `beta_slow` are divided by the factor."""
    low = _pair_turning(frequencies, length, scaling.beta_fast)
    high = _pair_turning(frequencies, length, scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The upper bound counts dimensions, not pairs, as in the code of YaRN's authors: models are trained with it.
    low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
    width = max(high - low, 0.001)
    divided = [_clamp((pair - low) / width) for pair in range(len(frequencies))]
    stretched = [frequency * (1 - part + part / scaling.factor) for frequency, part in zip(frequencies, divided, strict=True)]
    return stretched, _attention_scaling(scaling)


def _pair_turning(frequencies: Sequence[float], length: int, turns: float) -> float:
    """The fractional index of the pair that makes `turns` turns in `length`, extrapolated beyond the ends."""
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
