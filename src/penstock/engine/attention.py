"""Attention over paged KV, behind one function, and what it must know of a step.

Plain torch operations: the pages of a sequence are gathered, then torch's attention runs on them. A kernel that reads pages in place
would replace only `attend`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from penstock.engine.page_memory import PageMemory
from penstock.engine.shape import ModelShape

Masks = dict[int | None, Tensor]
"""What is added to the scores, by window. Made for the first layer and used by all others."""

# Tokens that are summed at once where rounding must not depend on the length of a sequence.
EXACT_PIECE = 128
# Scores of a prompt's piece that may be in memory at once: 256 MB in float32. More are computed in pieces of rows.
MAX_SCORES = 2**26
# The largest head of torch's flash attention.
MAX_FLASH_SIZE = 256


@dataclass(frozen=True)
class PromptPart:
    """A piece of one prompt: rows `start` to below `stop` of the step. They are the last of the `context` tokens in `pages`."""

    start: int
    stop: int
    context: int
    pages: Tensor
    masks: Masks = field(default_factory=dict)


@dataclass(frozen=True)
class DecodeGroup:
    """Sequences of similar length with one token each: rows `start` to below `stop`, their padded page tables and their lengths."""

    start: int
    stop: int
    pages: Tensor
    lengths: Tensor
    masks: Masks = field(default_factory=dict)


@dataclass(frozen=True)
class AttentionPlan:
    """Where the step's keys and values are written, and what each row sees. A slot is page * page size + offset."""

    slots: Tensor
    prompts: tuple[PromptPart, ...]
    decodes: tuple[DecodeGroup, ...]


class KVStore:
    """Keys and values of every layer, [pages, page size, heads, head size] each: zeros at first, since padding is masked, but NaN times
    zero is NaN. With `is_exact`, attention rounds the same way for a prompt and for a single token, as far as the matrix library allows."""

    def __init__(
        self, model: ModelShape, pages: int, page_size: int, dtype: torch.dtype, device: torch.device, is_exact: bool = False
    ) -> None:
        if device.type == "cuda":
            # cuDNN's attention plans every new shape, which takes a tenth of a second. Here shapes are new all the time.
            torch.backends.cuda.enable_cudnn_sdp(False)
        shape = (2, model.layers, pages, page_size, model.kv_heads, model.head_dim)
        self.is_exact = is_exact
        self.device = device
        self.memory: PageMemory | None = None
        """The same memory as slots; None on a GPU."""
        if device.type == "cpu":
            self.memory = PageMemory(2 * model.layers, pages, math.prod(shape[3:]) * dtype.itemsize)
            both = self.memory.tensor.view(dtype).view(shape)
        else:
            both = torch.zeros(shape, dtype=dtype, device=device)
        self.keys, self.values = both
        # The same memory as words: [2 * layers, pages, words], keys first. A copy needs no numbers.
        self.strips = both.view(2 * model.layers, pages, -1).view(torch.int64)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def wipe(self, pages: list[int]) -> None:
        """Fills these pages with zeros. What is behind the end of a sequence is masked, but a NaN would show through."""
        if pages:
            index = torch.tensor(pages, device=self.keys.device)
            self.keys.index_fill_(1, index, 0)
            self.values.index_fill_(1, index, 0)


def attend(queries: Tensor, store: KVStore, layer: int, plan: AttentionPlan, window: int | None) -> Tensor:
    """Attention of each query [rows, heads, head size] to its sequence, up to itself, at most `window` tokens back."""
    keys, values = store.keys[layer], store.values[layer]
    attend_prompt, attend_decode = (_attend_prompt_exactly, _attend_decode_exactly) if store.is_exact else (_attend_prompt, _attend_decode)
    parts = [attend_prompt(queries[part.start : part.stop], keys, values, part, window) for part in plan.prompts]
    parts += [attend_decode(queries[group.start : group.stop], keys, values, group, window) for group in plan.decodes]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_prompt(queries: Tensor, keys: Tensor, values: Tensor, part: PromptPart, window: int | None) -> Tensor:
    rows, heads, size = queries.shape
    keys, values = _gather(keys, part.pages[None])[:, :, : part.context], _gather(values, part.pages[None])[:, :, : part.context]
    if _has_flash(queries.device, queries.dtype, size):
        return attend_causally(queries, keys, values, window).reshape(rows, -1)
    if queries.is_cuda:
        # The kernel for other types needs a key per query: with fewer keys torch would keep all scores in memory.
        keys, values = (each.repeat_interleave(heads // each.shape[1], 1) for each in (keys, values))
    has_groups = heads != keys.shape[1]
    queries = queries.transpose(0, 1).unsqueeze(0)
    if rows == part.context and window is None:
        # A whole prompt: torch knows the causal mask and skips what is hidden.
        seen = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=has_groups)
        return seen.squeeze(0).transpose(0, 1).reshape(rows, -1)
    parts: list[Tensor] = []
    for piece in _pieces(part, heads):
        seen_from, seen_to = _visible_range(part, piece, window)
        mask = _prompt_mask(part, piece, range(seen_from, seen_to), window, keys)
        visible = slice(seen_from, seen_to)
        some = queries[:, :, piece.start : piece.stop]
        parts.append(scaled_dot_product_attention(some, keys[:, :, visible], values[:, :, visible], attn_mask=mask, enable_gqa=has_groups))
    return torch.cat(parts, 2).squeeze(0).transpose(0, 1).reshape(rows, -1)


@functools.cache
def _has_flash(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether `attend_causally` works there: on NVIDIA's GPUs since Ampere, for 16-bit types. AMD's kernel counts from the first key."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= MAX_FLASH_SIZE


def attend_causally(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Attention on a GPU of queries [rows, heads, head size] that are the last rows of keys and values [1, KV heads, tokens, head size].

    Flash attention counts the causal mask from the last key, knows windows and shared keys, and never has the scores in memory. torch's
    `scaled_dot_product_attention` has no way to ask for this: with a mask it falls back to plain products.
    """
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    left = None if window is None else window - 1
    seen = torch.ops.aten._flash_attention_forward(
        queries[None], keys, values, None, None, len(queries), keys.shape[1], 0.0, True, False, window_size_left=left, window_size_right=0
    )
    attended: Tensor = seen[0]
    return attended


def _attend_decode(queries: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, window: int | None) -> Tensor:
    count, heads, size = queries.shape
    keys, values = _gather(keys, group.pages), _gather(values, group.pages)
    kv_heads = keys.shape[1]
    # Queries that share a key become rows, so that keys need not be repeated.
    queries = queries.view(count, kv_heads, heads // kv_heads, size)
    mask = _decode_mask(group, window, keys).expand(count, 1, heads // kv_heads, -1)
    return scaled_dot_product_attention(queries, keys, values, attn_mask=mask).reshape(count, -1)


def _attend_prompt_exactly(queries: Tensor, keys: Tensor, values: Tensor, part: PromptPart, window: int | None) -> Tensor:
    rows, heads, size = queries.shape
    keys, values = _gather(keys, part.pages[None]), _gather(values, part.pages[None])
    kv_heads = keys.shape[1]
    groups = heads // kv_heads
    queries = queries.view(rows, kv_heads, groups, size).transpose(0, 1)
    parts: list[Tensor] = []
    for piece in _pieces(part, heads):
        mask = _prompt_mask(part, piece, range(keys.shape[2]), window, keys).repeat_interleave(groups, 0)
        some = queries[:, piece.start : piece.stop].reshape(1, kv_heads, len(piece) * groups, size)
        parts.append(_attend_plainly(some, keys, values, mask).view(kv_heads, len(piece), groups * size))
    return torch.cat(parts, 1).transpose(0, 1).reshape(rows, -1)


def _attend_decode_exactly(queries: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, window: int | None) -> Tensor:
    count, heads, size = queries.shape
    keys, values = _gather(keys, group.pages), _gather(values, group.pages)
    kv_heads = keys.shape[1]
    queries = queries.view(count, kv_heads, heads // kv_heads, size)
    return _attend_plainly(queries, keys, values, _decode_mask(group, window, keys)).reshape(count, -1)


def _attend_plainly(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Plain products, summed over pieces of a fixed length.

    The rounding of torch's attention depends on the number of queries, and that of one large product on the number of summands. Here it
    depends on neither. Hidden tokens have weight zero, so further pieces change nothing.
    """
    scores = torch.matmul(queries, keys.transpose(-1, -2)).mul_(queries.shape[-1] ** -0.5).add_(mask)
    weights = scores.softmax(-1)
    missing = -weights.shape[-1] % EXACT_PIECE
    weights, values = pad(weights, (0, missing)), pad(values, (0, 0, 0, missing))
    seen = torch.zeros_like(queries)
    for start in range(0, weights.shape[-1], EXACT_PIECE):
        piece = slice(start, start + EXACT_PIECE)
        seen += torch.matmul(weights[..., piece], values[..., piece, :])
    return seen


def _gather(cache: Tensor, pages: Tensor) -> Tensor:
    """All tokens in these pages [count, pages], also those behind a sequence's end, as [count, heads, tokens, head size]."""
    gathered = cache.index_select(0, pages.flatten())
    return gathered.view(pages.shape[0], -1, *cache.shape[2:]).transpose(1, 2)


def _pieces(part: PromptPart, heads: int) -> list[range]:
    """The rows of a prompt in pieces. Each piece has at most MAX_SCORES scores."""
    rows = part.stop - part.start
    most = max(1, MAX_SCORES // (heads * part.context))
    return [range(first, min(first + most, rows)) for first in range(0, rows, most)]


def _visible_range(part: PromptPart, piece: range, window: int | None) -> tuple[int, int]:
    """From the first to behind the last token that these rows see."""
    before = part.context - (part.stop - part.start)
    return 0 if window is None else max(0, before + piece.start - window + 1), before + piece.stop


def _prompt_mask(part: PromptPart, piece: range, others: range, window: int | None, keys: Tensor) -> Tensor:
    """Row i is the token at `context - rows + i`. Kept for all layers only where it is one piece."""
    mask = part.masks.get(window)
    if mask is None:
        before = part.context - (part.stop - part.start)
        own = torch.arange(before + piece.start, before + piece.stop, device=keys.device)
        mask = _visible_to(own[:, None], others, window, keys)
        if len(piece) == part.stop - part.start:
            part.masks[window] = mask
    return mask


def _decode_mask(group: DecodeGroup, window: int | None, keys: Tensor) -> Tensor:
    mask = group.masks.get(window)
    if mask is None:
        mask = group.masks[window] = _visible_to(group.lengths[:, None, None, None] - 1, range(keys.shape[2]), window, keys)
    return mask


def _visible_to(own: Tensor, among: range, window: int | None, keys: Tensor) -> Tensor:
    """The mask for tokens at the positions `own`: zero where they see one `among` these, minus infinity elsewhere."""
    others = torch.arange(among.start, among.stop, device=keys.device)
    hidden = others > own
    if window is not None:
        hidden |= others <= own - window
    return torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device).masked_fill_(hidden, -math.inf)
