"""What a Llama-family decoder looks like: all that the engine must know of a model beside its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions are stretched beyond the length that a model was pre-trained with. Names as in Hugging Face's config.

    `original_length` 0 stands for the model's trained length; `attention_factor` None is derived. `divisors`, one a frequency,
    is how GGUF stores llama3 and replaces its four numbers.
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
    """Sizes and switches of one decoder. `sliding_window` None: every layer sees everything."""

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
