"""The Llama-family decoder: Llama, Mistral, Qwen2, Qwen3 and models of the same shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
    """One step: a row for each token that it computes."""

    token_ids: Tensor
    positions: Tensor
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
        places = _Places(dtype, device)
        embedding = places.matrix("model.embed_tokens", shape.vocab_size, shape.hidden_size)
        self._layers = [_layer(places, shape, f"model.layers.{index}.") for index in range(shape.layers)]
        self._norm = places.vector("model.norm.weight", shape.hidden_size)
        self._head = embedding if shape.tied_embeddings else places.matrix("lm_head", shape.vocab_size, shape.hidden_size)
        self._embedding = embedding.t()
        places.fill(weights)
        frequencies, self.rope_scale = rotary_frequencies(shape, context_length)
        self._frequencies = frequencies.to(device)
        self.on_progress: Callable[[], None] = lambda: None
        """Called between the parts of a step that may take long, in the thread that computes."""

    @property
    def bytes(self) -> int:
        """The size of the weights that a step reads."""
        tensors = [tensor for name, tensor in self.tensors() if name not in ("embedding", "frequencies")]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All weights as they are computed with, and the frequencies of positions."""
        for index, layer in enumerate(self._layers):
            yield from ((f"{index} {name}", value) for name, value in vars(layer).items() if isinstance(value, Tensor))
        others = {"norm": self._norm, "head": self._head, "embedding": self._embedding, "frequencies": self._frequencies}
        yield from others.items()

    @torch.inference_mode()
    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        """The last hidden state of each row. Writes the keys and values of all rows to the store."""
        hidden = self._embedding.index_select(0, batch.token_ids)
        rotation = self._rotation(batch.positions)
        for index, layer in enumerate(self._layers):
            self.on_progress()
            hidden = self._through(index, layer, hidden, rotation, batch, store)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of these hidden states, in float32. Each row is as wide as the vocabulary: ask for few at once."""
        self.on_progress()
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
        return (angles.cos() * self.rope_scale).to(self.dtype), (angles.sin() * self.rope_scale).to(self.dtype)


def _times(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat((-second, first), -1) * sines


class _Places:
    """Where each tensor of a checkpoint goes. All memory is there first, and each tensor is copied to its place when it is read.

    So loading takes little more memory than the model: joining tensors that were loaded before would leave as much again unused.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._places: dict[str, tuple[Tensor, tuple[int, ...]]] = {}

    def vector(self, name: str, size: int) -> Tensor:
        return self.vectors({name: 1}, size).view(size)

    def vectors(self, counts: dict[str, int], size: int) -> Tensor:
        """One row for each, as often as its count says."""
        joined = self._empty(sum(counts.values()), size)
        for (name, _), place in zip(counts.items(), torch.split(joined, list(counts.values())), strict=True):
            self._places[name] = place, (size,)
        return joined

    def bias(self, parts: Parts) -> Tensor:
        joined = self._empty(sum(size for _, size in parts))
        for (name, size), place in zip(parts, torch.split(joined, [size for _, size in parts]), strict=True):
            self._places[f"{name}.bias"] = place, (size,)
        return joined

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self.joined(((name, rows),), columns)

    def joined(self, parts: Parts, columns: int) -> Tensor:
        """As [in, out]. On a CPU also in memory: batches of 8 to 16 rows are then up to twice as fast."""
        rows = sum(size for _, size in parts)
        matrix = self._empty(columns, rows) if self._device.type == "cpu" else self._empty(rows, columns).t()
        for (name, size), place in zip(parts, torch.split(matrix.t(), [size for _, size in parts]), strict=True):
            self._places[f"{name}.weight"] = place, (size, columns)
        return matrix

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Each tensor must be there once. One without a place would mean that a part of the model is ignored."""
        unknown: list[str] = []
        for name, tensor in weights:
            if name not in self._places:
                unknown.append(name)
                continue
            place, shape = self._places.pop(name)
            if tuple(tensor.shape) != shape:
                raise ConfigError(f"the weight {name!r} has shape {tuple(tensor.shape)}; the model's configuration says {shape}")
            place.copy_(tensor)
        if self._places:
            raise ConfigError(f"the model has no weight {next(iter(self._places))!r}, which its configuration needs")
        if unknown:
            names = ", ".join(sorted(unknown)[:3])
            raise ConfigError(f"the model has {len(unknown)} weights that its configuration does not need, such as {names}")

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)


def _layer(places: _Places, shape: ModelShape, prefix: str) -> Layer:
    hidden, wide = shape.hidden_size, shape.intermediate_size
    query_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv = ((attention + "q_proj", query_size), (attention + "k_proj", kv_size), (attention + "v_proj", kv_size))
    gate_up = ((mlp + "gate_proj", wide), (mlp + "up_proj", wide))
    qk_norm = {attention + "q_norm.weight": shape.heads, attention + "k_norm.weight": shape.kv_heads}
    return Layer(
        input_norm=places.vector(prefix + "input_layernorm.weight", hidden),
        qkv=places.joined(qkv, hidden),
        qkv_bias=places.bias(qkv) if shape.qkv_bias else None,
        qk_norm=places.vectors(qk_norm, shape.head_dim) if shape.qk_norm else None,
        output=places.matrix(attention + "o_proj", hidden, query_size),
        output_bias=places.bias(((attention + "o_proj", hidden),)) if shape.output_bias else None,
        mlp_norm=places.vector(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=places.joined(gate_up, hidden),
        gate_up_bias=places.bias(gate_up) if shape.mlp_bias else None,
        down=places.matrix(mlp + "down_proj", hidden, wide),
        down_bias=places.bias(((mlp + "down_proj", hidden),)) if shape.mlp_bias else None,
    )
