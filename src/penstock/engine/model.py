"""The Llama-family decoder: Llama, Mistral, Qwen2, Qwen3 and models of the same shape."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from penstock.engine.attention import AttentionPlan, KVStore, attend
from penstock.engine.shape import ModelShape, rotary_frequencies
from penstock.wire.errors import ConfigError

Parts = tuple[tuple[str, int], ...]
"""Names of weights that are joined into one matrix, with the rows of each."""


@dataclass(frozen=True)
class Batch:
    """One step: a row for each token that it computes. `wanted` are the rows whose logits are needed."""

    token_ids: Tensor
    positions: Tensor
    wanted: Tensor
    attention: AttentionPlan


@dataclass(frozen=True)
class Layer:
    """The weights of one layer, matrices as [in, out]. Matrices with the same input are joined."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Model:
    """The weights, and a forward step through them."""

    def __init__(
        self, shape: ModelShape, weights: Iterable[tuple[str, Tensor]], context_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        found = _Weights(weights, dtype, device)
        embedding = found.matrix("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
        self._layers = [_layer(found, shape, f"model.layers.{index}.") for index in range(shape.layers)]
        self._norm = found.take("model.norm.weight", shape.hidden_size)
        self._head = embedding if shape.tied_embeddings else found.matrix("lm_head.weight", shape.vocab_size, shape.hidden_size)
        self._embedding = embedding.t()
        found.check_all_taken()
        frequencies, self._rope_scale = rotary_frequencies(shape, context_length)
        self._frequencies = frequencies.to(device)

    @property
    def bytes(self) -> int:
        """The size of the weights that a step reads."""
        tensors = [value for layer in self._layers for value in vars(layer).values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in [*tensors, self._norm, self._head])

    @torch.inference_mode()
    def logits(self, batch: Batch, store: KVStore) -> Tensor:
        """The logits of the wanted rows, in float32. Writes the keys and values of all rows to the store."""
        hidden = self._embedding.index_select(0, batch.token_ids)
        rotation = self._rotation(batch.positions)
        for index, layer in enumerate(self._layers):
            hidden = self._through(index, layer, hidden, rotation, batch, store)
        hidden = hidden.index_select(0, batch.wanted)
        return torch.mm(self._normed(hidden, self._norm), self._head).float()

    def _through(self, index: int, layer: Layer, hidden: Tensor, rotation: tuple[Tensor, Tensor], batch: Batch, store: KVStore) -> Tensor:
        shape = self.shape
        rows = hidden.shape[0]
        qkv = _times(self._normed(hidden, layer.input_norm), layer.qkv, layer.qkv_bias).view(rows, -1, shape.head_dim)
        queries_keys, values = qkv.tensor_split((shape.heads + shape.kv_heads,), 1)
        if layer.qk_norm is not None:
            queries_keys = rms_norm(queries_keys, (shape.head_dim,), None, shape.norm_eps) * layer.qk_norm
        queries, keys = _rotated(queries_keys, *rotation).tensor_split((shape.heads,), 1)
        store.write(index, batch.attention.slots, keys, values)
        window = shape.sliding_window if index in shape.sliding_layers else None
        seen = attend(queries, store, index, batch.attention, window)
        hidden = hidden + _times(seen, layer.output, layer.output_bias)
        gate, up = _times(self._normed(hidden, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return hidden + _times(silu(gate).mul_(up), layer.down, layer.down_bias)

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden, (self.shape.hidden_size,), weight, self.shape.norm_eps)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each row, [rows, 1, head size]."""
        angles = positions[:, None, None] * self._frequencies
        angles = torch.cat((angles, angles), -1)
        return (angles.cos() * self._rope_scale).to(self.dtype), (angles.sin() * self._rope_scale).to(self.dtype)


def _times(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat((-second, first), -1) * sines


class _Weights:
    """Checkpoint tensors by name. Each is taken once, and its shape is checked."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device) -> None:
        self._tensors = {name: tensor.to(device=device, dtype=dtype) for name, tensor in weights}

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.pop(name, None)
        if tensor is None:
            raise ConfigError(f"the model has no weight {name!r}, which its configuration needs")
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"the weight {name!r} has shape {tuple(tensor.shape)}; the model's configuration says {shape}")
        return tensor

    def check_all_taken(self) -> None:
        """An unused weight would mean that a part of the model is ignored."""
        if self._tensors:
            names = ", ".join(sorted(self._tensors)[:3])
            raise ConfigError(f"the model has {len(self._tensors)} weights that its configuration does not need, such as {names}")

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return _input_first(self.take(name, rows, columns))

    def joined_matrix(self, prefix: str, parts: Parts, columns: int) -> Tensor:
        return _input_first(torch.cat([self.take(f"{prefix}{part}.weight", size, columns) for part, size in parts]))

    def joined_bias(self, prefix: str, parts: Parts) -> Tensor:
        return torch.cat([self.take(f"{prefix}{part}.bias", size) for part, size in parts])


def _input_first(matrix: Tensor) -> Tensor:
    """Turns [out, in] into [in, out]. On a CPU also in memory: batches of 8 to 16 rows are then up to twice as fast."""
    return matrix.t().contiguous() if matrix.device.type == "cpu" else matrix.t()


def _layer(found: _Weights, shape: ModelShape, prefix: str) -> Layer:
    hidden, wide = shape.hidden_size, shape.intermediate_size
    query_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    qkv = (("q_proj", query_size), ("k_proj", kv_size), ("v_proj", kv_size))
    gate_up = (("gate_proj", wide), ("up_proj", wide))
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qk_norm = None
    if shape.qk_norm:
        query_norm, key_norm = (found.take(f"{attention}{name}_norm.weight", shape.head_dim) for name in ("q", "k"))
        qk_norm = torch.cat((query_norm.expand(shape.heads, -1), key_norm.expand(shape.kv_heads, -1)))
    return Layer(
        input_norm=found.take(prefix + "input_layernorm.weight", hidden),
        qkv=found.joined_matrix(attention, qkv, hidden),
        qkv_bias=found.joined_bias(attention, qkv) if shape.qkv_bias else None,
        qk_norm=qk_norm,
        output=found.matrix(attention + "o_proj.weight", hidden, query_size),
        output_bias=found.take(attention + "o_proj.bias", hidden) if shape.output_bias else None,
        mlp_norm=found.take(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=found.joined_matrix(mlp, gate_up, hidden),
        gate_up_bias=found.joined_bias(mlp, gate_up) if shape.mlp_bias else None,
        down=found.matrix(mlp + "down_proj.weight", hidden, wide),
        down_bias=found.take(mlp + "down_proj.bias", hidden) if shape.mlp_bias else None,
    )
