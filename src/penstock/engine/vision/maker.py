"""A tower with the slots that it writes: what an engine and an encode worker have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from penstock.engine.memory import is_out_of_memory, release_unused
from penstock.engine.vision.store import FeatureStore
from penstock.engine.vision.tower import Tower
from penstock.kv.moving import SlotMemory
from penstock.wire.images import ImageSpan


class TowerMaker:
    """A `backends.encode.FeatureMaker`. `load` is called with the first image: a worker whose images others encode needs no tower.

    One thread calls it. On a GPU it has a stream of its own, so that steps go on beside it.
    """

    def __init__(self, load: Callable[[], Tower], store: FeatureStore, fingerprint: bytes, device: torch.device) -> None:
        self.fingerprint = fingerprint
        self.store = store
        self.on_progress: Callable[[], None] = lambda: None
        """Called while an image is encoded, in the thread that does it. It may raise, to end that."""
        self._load = load
        self._device = device
        self._tower: Tower | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def memory(self) -> SlotMemory:
        return self.store.memory

    def load(self) -> Tower:
        """Loads the tower now, if it is not."""
        if self._tower is None:
            # In the stream that uses the weights: another one need not have copied them yet.
            with self._beside():
                self._tower = self._load()
            self._tower.on_progress = self._progressed
        return self._tower

    def _beside(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _progressed(self) -> None:
        self.on_progress()

    @torch.inference_mode()
    def encode(self, span: ImageSpan, pixels: bytes, slots: Sequence[int]) -> None:
        """Writes the features of an image into these slots. Raises ValueError when the pixels do not fit the span, or make features that
        are not numbers; MemoryError when there is too little memory for this one."""
        try:
            with self._beside():
                (features,) = self.load().encode([(pixels, span.grid)])
                is_finite = bool(features.isfinite().all())
                if is_finite:
                    # Nothing may fail behind this: a copy that goes on would write to slots that others have by then.
                    self.store.write(slots, features)
            if self._stream is not None:
                self._stream.synchronize()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        else:
            if not is_finite:
                raise ValueError("the tower makes features that are not numbers")
            return
        # Not before the error is gone: its frames hold the tensors.
        release_unused(self._device)
        raise MemoryError(reason)

    def close(self) -> None:
        """Nobody encodes any more."""
        self._tower = None
