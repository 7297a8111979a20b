"""The simulator's tiers: tiny real slots in host memory and on disk, copied in the time that real blocks would take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from penstock.backends.disk_tier import RECORD_BYTES, DiskTier
from penstock.backends.simulated_kv import SLOT_BYTES, Link, SimulatedSlots
from penstock.config.engines import GIB, SimulatorConfig
from penstock.kv.cache import KVCache
from penstock.kv.rates import Rate
from penstock.kv.tiers import HostTier, Tiers
from penstock.wire.errors import ConfigError

MAX_COPYING = 1024
"""Blocks that are queued for copies at a time. The simulator's copies hold up no step."""


class SimulatedCopies:
    """A `kv.tiers.PageCopies` between two memories of tiny slots. `wake` is called when a copy has ended."""

    def __init__(self, pages: SimulatedSlots, slots: SimulatedSlots, block_bytes: int, gbps: float, wake: Callable[[], None]) -> None:
        self.load_rate = gbps * 1e9 / 8
        self._pages = pages
        self._slots = slots
        self._block_bytes = block_bytes
        self._wake = wake
        loop = asyncio.get_running_loop()
        self._down, self._up = Link(self.load_rate, loop), Link(self.load_rate, loop)

    def save(self, pages: Sequence[int], slots: Sequence[int], on_end: Callable[[], None]) -> None:
        # The pages may be used again after this call.
        _copy(self._pages, pages, self._slots, slots)
        self._carry(self._down, len(pages), on_end)

    def load(self, slots: Sequence[int], pages: Sequence[int], on_end: Callable[[], None]) -> None:
        def end() -> None:
            _copy(self._slots, slots, self._pages, pages)
            on_end()

        self._carry(self._up, len(pages), end)

    def protect(self, pages: Iterable[int]) -> None:
        pass

    def _carry(self, link: Link, blocks: int, on_end: Callable[[], None]) -> None:
        def end() -> None:
            on_end()
            self._wake()

        link.carry(b"", blocks * self._block_bytes, end)


def _copy(sources: SimulatedSlots, from_slots: Sequence[int], targets: SimulatedSlots, to_slots: Sequence[int]) -> None:
    for source, target in zip(from_slots, to_slots, strict=True):
        targets.views(target)[0][:] = sources.views(source)[0]


class SimulatedTiers:
    """Host memory and disk of the simulator. Make it on the event loop."""

    def __init__(
        self,
        config: SimulatorConfig,
        cache: KVCache,
        pages: SimulatedSlots,
        fingerprint: bytes,
        prefill: Rate,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        size = config.moved_block_bytes
        if config.host_bytes() < size:
            raise ConfigError(f"--kv-host-memory has no room for a KV block of {size} bytes")
        self._memory = SimulatedSlots(config.host_bytes() // size)
        copies = SimulatedCopies(pages, self._memory, size, config.kv_host_gbps, wake)
        self._disk = None if config.kv_disk is None else _open_disk(config, fingerprint, wake)
        host = HostTier(copies, self._memory, MAX_COPYING)
        self.tiers = Tiers(host, self._disk, cache.events, prefill, config.block_size, size, clock, config.lease_share)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()
        self._memory.close()


def _open_disk(config: SimulatorConfig, fingerprint: bytes, wake: Callable[[], None]) -> DiskTier:
    assert config.kv_disk is not None
    size = config.moved_block_bytes
    slots = int(config.kv_disk_size * GIB) // size
    loop = asyncio.get_running_loop()
    disk = DiskTier(config.kv_disk, fingerprint, SLOT_BYTES, slots * (SLOT_BYTES + RECORD_BYTES), size * 8 / (config.kv_disk_gbps * 1e9))

    def tell() -> None:
        loop.call_soon_threadsafe(wake)

    disk.on_done = tell
    return disk
