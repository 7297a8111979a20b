"""Attention over paged KV, behind one function, and what it must know of a step.

Plain torch operations: the pages of a sequence are gathered, and the library's attention does the rest. A kernel that reads pages in
place would replace `attend` alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.engine.shape import ModelShape


@dataclass(frozen=True)
class PromptPart:
    """A piece of one prompt: rows `start` to below `stop` of the step, the last of `context` tokens that `pages` hold."""

    start: int
    stop: int
    context: int
    pages: Tensor


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences of like length with one token each: rows `start` to below `stop`, their page tables, padded, and their lengths."""

    start: int
    stop: int
    pages: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class AttentionPlan:
    """Where the step's keys and values go, and what each row sees. `slots` counts tokens through all pages."""

    slots: Tensor
    prompts: tuple[PromptPart, ...]
    decodes: tuple[DecodeGroup, ...]


class KVStore:
    """Keys and values of every layer, [pages, page size, heads, head size] each."""

    def __init__(self, model: ModelShape, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (model.layers, pages, page_size, model.kv_heads, model.head_dim)
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Not whatever was there: padding is masked out, but a NaN times zero is a NaN.

    On a CPU the system gives zeroed memory when a page of it is first touched; torch would touch all of it at once.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(numpy.zeros(math.prod(shape) * dtype.itemsize, numpy.uint8)).view(dtype).view(shape)


def attend(queries: Tensor, store: KVStore, layer: int, plan: AttentionPlan, window: int | None) -> Tensor:
    """What each query [rows, heads, head size] sees of its sequence, itself included, at most `window` tokens back."""
    keys, values = store.keys[layer], store.values[layer]
    parts = [_attend_prompt(queries[part.start : part.stop], keys, values, part, window) for part in plan.prompts]
    parts += [_attend_decode(queries[group.start : group.stop], keys, values, group, window) for group in plan.decodes]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_prompt(queries: Tensor, keys: Tensor, values: Tensor, part: PromptPart, window: int | None) -> Tensor:
    heads, rows = queries.shape[1], part.stop - part.start
    keys, values = _gather(keys, part.pages, 1, part.context), _gather(values, part.pages, 1, part.context)
    is_whole = rows == part.context and window is None
    mask = None if is_whole else _causal_mask(rows, part.context, window, queries.device)
    seen = scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0), keys, values, attn_mask=mask, is_causal=is_whole, enable_gqa=heads != keys.shape[1]
    )
    return seen.squeeze(0).transpose(0, 1).reshape(rows, -1)


def _attend_decode(queries: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, window: int | None) -> Tensor:
    count, heads, size = queries.shape
    longest = group.pages.shape[1] * keys.shape[1]
    keys, values = _gather(keys, group.pages, count, longest), _gather(values, group.pages, count, longest)
    kv_heads = keys.shape[1]
    positions = torch.arange(longest, device=queries.device)
    visible = positions < group.lengths[:, None]
    if window is not None:
        visible &= positions >= group.lengths[:, None] - window
    # The queries that share a key are its rows, so that the keys need not be repeated.
    queries = queries.view(count, kv_heads, heads // kv_heads, size)
    mask = visible[:, None, None, :].expand(count, 1, heads // kv_heads, longest)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask).reshape(count, -1)


def _gather(cache: Tensor, pages: Tensor, count: int, length: int) -> Tensor:
    """The first `length` tokens of each sequence, as [count, heads, length, head size]."""
    gathered = cache.index_select(0, pages.flatten())
    return gathered.view(count, -1, *cache.shape[2:])[:, :length].transpose(1, 2)


def _causal_mask(rows: int, context: int, window: int | None, device: torch.device) -> Tensor:
    """Row i is the token at `context - rows + i`."""
    own = torch.arange(context - rows, context, device=device)[:, None]
    others = torch.arange(context, device=device)
    visible = others <= own
    if window is not None:
        visible &= others > own - window
    return visible
