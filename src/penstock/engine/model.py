"""The Llama-family decoder: Llama, Mistral, Qwen2, Qwen3 and models of the same shape, also with images in their prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from penstock.engine.attention import AttentionPlan, KVStore, attend
from penstock.engine.checkpoints.places import Places
from penstock.engine.shape import ModelShape, rotary_frequencies


@dataclass(frozen=True)
class ImageRows:
    """The rows of a step that are positions of images: their numbers [count], and their features [count, hidden size × levels]. The first
    level is used instead of a token's embedding. The others are added behind the first layers, one behind each."""

    rows: Tensor
    features: Tensor


@dataclass(frozen=True)
class Batch:
    """One step: a row for each token that it computes. `positions` are [rows]; or [3, rows], if there is a row whose place has three axes:
    see positions_of. `images` None: all rows are tokens. A row that is a position of an image may have any token id of the vocabulary."""

    token_ids: Tensor
    positions: Tensor
    attention: AttentionPlan
    images: ImageRows | None = None


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
        places = Places(dtype, device)
        embedding = places.matrix("model.embed_tokens", shape.vocab_size, shape.hidden_size)
        self._layers = [_layer(places, shape, f"model.layers.{index}.") for index in range(shape.layers)]
        self._norm = places.vector("model.norm.weight", shape.hidden_size)
        self._head = embedding if shape.tied_embeddings else places.matrix("lm_head", shape.vocab_size, shape.hidden_size)
        self._embedding = embedding.t()
        places.fill(weights)
        frequencies, self.rope_scale = rotary_frequencies(shape, context_length)
        self._frequencies = frequencies.to(device)
        self._axes = torch.tensor(shape.rope_axes, dtype=torch.int64, device=device)
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
        levels = self._levels(batch.images)
        if batch.images is not None:
            hidden.index_copy_(0, batch.images.rows, levels[0])
        for index, layer in enumerate(self._layers):
            self.on_progress()
            hidden = self._through(index, layer, hidden, rotation, batch, store)
            if batch.images is not None and index + 1 < len(levels):
                hidden.index_add_(0, batch.images.rows, levels[index + 1])
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

    def _levels(self, images: ImageRows | None) -> tuple[Tensor, ...]:
        return () if images is None else torch.split(images.features.to(self.dtype), self.shape.hidden_size, -1)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of each row, [rows, 1, head size]. With three axes, each pair of a head turns by its own one."""
        places = positions[:, None, None] if positions.dim() == 1 else positions.index_select(0, self._axes).t()[:, None]
        angles = places * self._frequencies
        angles = torch.cat((angles, angles), -1)
        return (angles.cos() * self.rope_scale).to(self.dtype), (angles.sin() * self.rope_scale).to(self.dtype)


def _times(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)


def _rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat((-second, first), -1) * sines


def _layer(places: Places, shape: ModelShape, prefix: str) -> Layer:
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
