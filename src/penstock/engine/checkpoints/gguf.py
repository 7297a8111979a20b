"""A GGUF file: weights with llama.cpp's names and types, converted to float32 and Hugging Face's names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from penstock.engine.shape import ModelShape, RopeScaling
from penstock.engine.vision.shape import TowerShape
from penstock.text.tokenizers.gguf_file import GgufFile, GgufTensor, read_gguf
from penstock.text.tokenizers.model_settings import ModelSettings
from penstock.wire.errors import ConfigError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
ROPE_DIVISORS = "rope_freqs.weight"

OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class GgufCheckpoint:
    """A `Checkpoint`."""

    shape: ModelShape
    end_ids: frozenset[int]
    file: GgufFile
    tower: TowerShape | None = None

    def tower_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        rotated = _rotated_heads(self.file.metadata, self.shape)
        for tensor in self.file.tensors:
            if tensor.name != ROPE_DIVISORS:
                name = _hugging_face_name(self.file, tensor)
                values = torch.from_numpy(_values(self.file.path, tensor))
                heads = rotated.get(name.split(".")[-2])
                yield name, values if heads is None else _in_halves(values, heads)


def open_gguf(path: Path) -> GgufCheckpoint:
    file = read_gguf(path)
    metadata = file.metadata
    architecture = metadata.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise metadata.wrong("general.architecture", f"one of {', '.join(ARCHITECTURES)}")
    if metadata.integer(f"{architecture}.expert_count", 0):
        raise metadata.wrong(f"{architecture}.expert_count", "none: models with experts are not supported")
    for tensor in file.tensors:
        _check_tensor(file, tensor)
    keys = [f"tokenizer.ggml.{key}" for key in END_KEYS]
    return GgufCheckpoint(_shape(file, architecture), frozenset(metadata.integer(key) for key in keys if metadata.has(key)), file)


def _shape(file: GgufFile, architecture: str) -> ModelShape:
    metadata = file.metadata
    tensors = {tensor.name: tensor for tensor in file.tensors}
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"{metadata.source}: token_embd.weight is missing: expected a model's weights, not only its vocabulary")
    heads, hidden_size = metadata.size(f"{architecture}.attention.head_count"), metadata.size(f"{architecture}.embedding_length")
    head_dim = metadata.size(f"{architecture}.attention.key_length", hidden_size // heads)
    layers = metadata.size(f"{architecture}.block_count")
    window = metadata.integer(f"{architecture}.attention.sliding_window", 0) or None
    return ModelShape(
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(metadata, architecture, heads),
        head_dim=head_dim,
        intermediate_size=metadata.size(f"{architecture}.feed_forward_length"),
        vocab_size=tensors["token_embd.weight"].dimensions[-1],
        trained_length=metadata.size(f"{architecture}.context_length"),
        norm_eps=metadata.positive(f"{architecture}.attention.layer_norm_rms_epsilon"),
        rope_theta=metadata.positive(f"{architecture}.rope.freq_base", 10_000.0),
        rope=_rope(file, architecture, tensors.get(ROPE_DIVISORS), head_dim),
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm=architecture == "qwen3",
        sliding_window=window,
        sliding_layers=frozenset(range(layers)) if window else frozenset(),
    )


def _kv_heads(metadata: ModelSettings, architecture: str, heads: int) -> int:
    key = f"{architecture}.attention.head_count_kv"
    kv_heads = metadata.size(key, heads)
    if heads % kv_heads:
        raise metadata.wrong(key, f"a divisor of the {heads} heads")
    return kv_heads


def _rope(file: GgufFile, architecture: str, divisors: GgufTensor | None, head_dim: int) -> RopeScaling:
    metadata, key = file.metadata, f"{architecture}.rope"
    if metadata.size(f"{key}.dimension_count", head_dim) != head_dim:
        raise metadata.wrong(f"{key}.dimension_count", f"{head_dim}: partial rotary heads are not supported")
    scaling = _scaling(metadata, key)
    if divisors is None:
        return scaling
    if scaling.kind != "default" or divisors.dimensions != (head_dim // 2,):
        raise ConfigError(
            f"{metadata.source}: {ROPE_DIVISORS} has shape {divisors.dimensions}: expected {head_dim // 2} values and no other scaling"
        )
    return RopeScaling("llama3", divisors=tuple(_values(file.path, divisors).tolist()))


def _scaling(metadata: ModelSettings, key: str) -> RopeScaling:
    original_length = metadata.integer(f"{key}.scaling.original_context_length", 0)
    match metadata.text(f"{key}.scaling.type", "none"):
        case "none":
            return RopeScaling()
        case "linear":
            return RopeScaling("linear", factor=metadata.positive(f"{key}.scaling.factor"), original_length=original_length)
        case "yarn":
            return _yarn(metadata, f"{key}.scaling", original_length)
        case _:
            raise metadata.wrong(f"{key}.scaling.type", "'none', 'linear' or 'yarn'")


def _yarn(metadata: ModelSettings, key: str, original_length: int) -> RopeScaling:
    factor = metadata.positive(f"{key}.factor")
    attention = metadata.positive(f"{key}.attn_factor", 1.0)
    return RopeScaling(
        "yarn",
        factor=factor,
        original_length=original_length,
        beta_fast=metadata.positive(f"{key}.yarn_beta_fast", 32.0),
        beta_slow=metadata.positive(f"{key}.yarn_beta_slow", 1.0),
        # llama.cpp multiplies it with the value derived from the factor.
        attention_factor=None if attention == 1.0 else attention * (0.1 * math.log(factor) + 1.0),
    )


def _check_tensor(file: GgufFile, tensor: GgufTensor) -> None:
    if tensor.name != ROPE_DIVISORS:
        _hugging_face_name(file, tensor)
    _check_kind(file, tensor)
    end = tensor.offset + math.prod(_byte_shape(tensor))
    if end > file.path.stat().st_size:
        raise ConfigError(f"{file.metadata.source}: the file is incomplete: it ends before tensor {tensor.name}, which ends at byte {end}")


def _check_kind(file: GgufFile, tensor: GgufTensor) -> None:
    where = f"{file.metadata.source}: tensor {tensor.name}"
    try:
        kind = gguf.GGMLQuantizationType(tensor.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        gguf.dequantize(np.zeros((1, size), dtype=np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"{where} has type {tensor.kind}: expected F32, F16, BF16 or a quantization that gguf can decode") from error
    if not tensor.dimensions or tensor.dimensions[0] % block:
        raise ConfigError(f"{where} has shape {tensor.dimensions}: expected rows whose length is a multiple of {block}, for {kind.name}")


def _byte_shape(tensor: GgufTensor) -> tuple[int, ...]:
    """The bytes of the rows, slowest dimension first."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.kind)]
    first, *others = tensor.dimensions
    return (*reversed(others), first // block * size)


def _values(path: Path, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    shape = _byte_shape(tensor)
    try:
        data = np.fromfile(path, dtype=np.uint8, count=math.prod(shape), offset=tensor.offset).reshape(shape)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {path}: cannot read tensor {tensor.name}: {error}") from error
    values: np.ndarray[Any, np.dtype[np.float32]] = gguf.dequantize(data, gguf.GGMLQuantizationType(tensor.kind))
    return values


def _hugging_face_name(file: GgufFile, tensor: GgufTensor) -> str:
    if tensor.name in OUTER_NAMES:
        return OUTER_NAMES[tensor.name]
    found = LAYER_NAME.fullmatch(tensor.name)
    if found is None or found[2] not in LAYER_NAMES:
        raise ConfigError(f"{file.metadata.source}: tensor {tensor.name!r} is unknown: expected only tensors of a Llama-family decoder")
    return f"model.layers.{found[1]}.{LAYER_NAMES[found[2]]}.{found[3]}"


def _rotated_heads(metadata: ModelSettings, shape: ModelShape) -> Mapping[str, int]:
    """The projections whose rows are reordered by the conversion to the `llama` architecture, and their heads."""
    if metadata.text("general.architecture") != "llama":
        return {}
    return {"q_proj": shape.heads, "k_proj": shape.kv_heads}


def _in_halves(values: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring rows of a head together; Hugging Face rotates a row of its first half with one of its second."""
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)
