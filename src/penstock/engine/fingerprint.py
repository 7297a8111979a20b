"""What gives KV its meaning, as a hash: workers whose hashes are equal can use each other's KV."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import Tensor

from penstock.engine.model import Model

FINGERPRINT_BYTES = 16
LAYOUT = 1
"""Raise it when the order of a page's bytes changes."""
SAMPLES = 256
"""Of each weight: sums do not know in which order numbers are."""


def kv_fingerprint(model: Model, page_size: int, *, is_reproducible: bool, images: bytes = b"") -> bytes:
    """Over sums and samples of all weights, the frequencies of positions with their stretching and axes, the number type and the layout of
    a page. `is_reproducible` rounds in its own way, and promises that no other rounding gets in. `images` is the fingerprint of what makes
    features of images, since the KV of their positions depends on it."""
    made = blake2b(digest_size=FINGERPRINT_BYTES, person=b"kv fingerprint")
    shape = model.shape
    sizes = (shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.norm_eps, shape.sliding_window, sorted(shape.sliding_layers))
    made.update(repr((LAYOUT, page_size, str(model.dtype), is_reproducible, sizes, model.rope_scale)).encode())
    if shape.rope_axes or images:
        made.update(repr((shape.rope_axes, images)).encode())
    _add(made, model.tensors())
    return made.digest()


def image_fingerprint(settings: object, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> bytes:
    """What gives features of images their meaning. `weights` as they are stored: a worker that gets its features from another one has the
    same fingerprint, without a tower."""
    made = blake2b(repr((settings, str(dtype))).encode(), digest_size=FINGERPRINT_BYTES, person=b"img fingerprint")
    _add(made, ((name, tensor.flatten(1) if tensor.dim() > 2 else tensor) for name, tensor in weights))
    return made.digest()


def _add(made: blake2b, weights: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in weights:
        made.update(f"{name} {tuple(tensor.shape)}".encode())
        made.update(_sums(tensor))
        made.update(_sample(tensor))


def _sums(tensor: Tensor) -> bytes:
    """Of the words of each row in memory, so that one number that differs is found: often only the vectors of some tokens were changed. A
    hash of all weights would take longer than loading them. It is taken where a row is no whole number of words, which is rare."""
    rows = tensor if tensor.is_contiguous() else tensor.t().contiguous()
    found = rows.view(torch.uint8) if rows.shape[-1] * rows.itemsize % 8 else rows.view(torch.int64).sum(-1)
    return found.cpu().numpy().tobytes()


def _sample(tensor: Tensor) -> bytes:
    """Numbers from all over a vector or a matrix, by their places in it and not in memory."""
    count = min(SAMPLES, tensor.numel())
    places = [torch.linspace(0, size - 1, count, dtype=torch.float64).long() for size in tensor.shape]
    if len(places) > 1:
        # Not along the diagonal alone.
        places[1] = (places[1] * 7919) % tensor.shape[1]
    found = tensor[tuple(place.to(tensor.device) for place in places)]
    return found.cpu().contiguous().view(torch.uint8).numpy().tobytes()
