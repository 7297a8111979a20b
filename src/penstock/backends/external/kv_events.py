"""What vLLM and SGLang say of their cached KV, under Penstock's names. Pure: no I/O."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from penstock.kv.blocks import ROOT, block_hashes
from penstock.wire.messages import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEvents, Snapshot

log = logging.getLogger(__name__)

# As many as a router keeps of one worker.
MOST_BLOCKS = 1_000_000

# An engine that does not say where a block is has only one place for it. Both say GPU for whatever device they run on.
DEVICE_MEDIA = (None, "GPU")
# The kinds of attention that look at every position. Of any other kind, a block does not stand for all that is before it.
WHOLE_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")

EngineHash = int | bytes
"""A block's name in the engine: 64 bits, signed in SGLang and unsigned in vLLM, or vLLM's whole digest. It is only ever compared."""


class EngineStored(Struct, frozen=True, tag="BlockStored"):
    """Blocks that the engine has cached, each behind the one before it.

    The fields stand in the order in which older versions sent them, without their names. SGLang then put its metadata where vLLM has
    `lora_name`. Speculative decoding in SGLang has pairs for tokens.
    """

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int | list[int]]
    block_size: int
    lora_id: Any = None
    medium: str | None = None
    lora_name: Any = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    cache_salt: Any = None


class EngineRemoved(Struct, frozen=True, tag="BlockRemoved"):
    """Blocks that the engine has no longer; or, in vLLM, one of several copies of them."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class EngineCleared(Struct, frozen=True, tag="AllBlocksCleared"):
    """The engine has emptied its cache."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


class EngineBatch(Struct, frozen=True, array_like=True):
    """What one step of the engine did to its cache. `rank` tells data-parallel replicas apart: each has a cache of its own."""

    at: float
    events: list[EngineEvent]
    rank: int | None = None


class _PositionalStored(EngineStored, frozen=True, array_like=True, tag="BlockStored"):
    pass


class _PositionalRemoved(EngineRemoved, frozen=True, array_like=True, tag="BlockRemoved"):
    pass


class _PositionalCleared(EngineCleared, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _PositionalBatch(Struct, frozen=True, array_like=True):
    at: float
    events: list[_PositionalStored | _PositionalRemoved | _PositionalCleared]
    rank: int | None = None


_DECODER = msgspec.msgpack.Decoder(EngineBatch)
_POSITIONAL_DECODER = msgspec.msgpack.Decoder(_PositionalBatch)


def decode_batch(payload: bytes) -> EngineBatch:
    """Raises ValueError for what is no batch of events. Both engines send events as maps; older versions of both sent arrays."""
    try:
        return _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            old = _POSITIONAL_DECODER.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ValueError(str(error)) from error
    return EngineBatch(old.at, list(old.events), old.rank)


class _Block:
    """A block that the engine has. It is told to others while all blocks before it are there as well."""

    __slots__ = ("name", "parent")

    def __init__(self, name: bytes, parent: bytes) -> None:
        self.name = name
        self.parent = parent


class _Telling:
    """Events in the making: blocks that follow each other become one event, as do removals."""

    def __init__(self) -> None:
        self._events: list[tuple[bytes | None, list[bytes]]] = []
        self._starts_cleared = False

    def stored(self, block: _Block) -> None:
        if self._events:
            parent, names = self._events[-1]
            if parent is not None and names[-1] == block.parent:
                names.append(block.name)
                return
        self._events.append((block.parent, [block.name]))

    def removed(self, block: _Block) -> None:
        if not self._events or self._events[-1][0] is not None:
            self._events.append((None, []))
        self._events[-1][1].append(block.name)

    def cleared(self) -> None:
        """What was before it need not be told."""
        self._events = []
        self._starts_cleared = True

    def events(self) -> tuple[KvEvent, ...]:
        told: list[KvEvent] = [BlocksCleared()] if self._starts_cleared else []
        for parent, names in self._events:
            told.append(BlocksRemoved(tuple(names)) if parent is None else BlocksStored(parent, tuple(names)))
        return tuple(told)


class BlockMirror:
    """What an engine has cached, by its own hashes, under the names that routers know.

    A name is made from tokens alone. A block whose KV depends on more (an adapter, an image, a salt), that lies elsewhere than on the
    device, or that is not of `block_size` tokens, has none, and neither have those behind it: they are ignored, and `unnamed` counts them.
    So is a block whose parent is not known.

    The engine may have more than is told, never less, but for what it has not said yet. vLLM can have several copies of a block, and says
    of each that it is stored, and removed; but it may also say twice of one copy that it is there. So with the first removal the block is
    taken to be gone. What lies behind a block that is gone is told to be gone, too, because a router that finds a block takes those
    before it for granted. It is kept in mind, and told again when the block comes back.
    """

    def __init__(self, block_size: int, most_blocks: int = MOST_BLOCKS) -> None:
        self.removed = 0
        self.unnamed = 0
        self._block_size = block_size
        self._most_blocks = most_blocks
        self._next_number = 0
        self._blocks: dict[EngineHash, _Block] = {}
        # By the name of the parent, whether that is there or not, then by name.
        self._children: dict[bytes, dict[bytes, _Block]] = {}
        # The names of those that are told, with the name of the parent, in the order in which they were: parents come before children.
        self._told: dict[bytes, bytes] = {}
        self._telling = _Telling()
        self._logged: set[str] = set()

    @property
    def cached(self) -> int:
        """Blocks that are told to be there."""
        return len(self._told)

    def apply(self, events: Sequence[EngineEvent]) -> KvEvents:
        """Takes what the engine has done. Returns what that means to others, which may be nothing."""
        for event in events:
            match event:
                case EngineStored():
                    self._store(event)
                case EngineRemoved():
                    self._remove(event)
                case EngineCleared():
                    self._clear()
        return self._take()

    def forget(self) -> KvEvents:
        """Something was missed: nothing that was known is certain any more."""
        self._clear()
        return self._take()

    def snapshot(self) -> Snapshot:
        """All that is told to be there, parents before children. There may be hundreds of thousands, and the loop waits: they are gone
        through once, in the order in which they came, and never looked up."""
        chains: list[tuple[bytes, list[bytes]]] = []
        # By the name of their last block.
        growing: dict[bytes, list[bytes]] = {}
        for name, parent in self._told.items():
            chain = growing.pop(parent, None)
            if chain is None:
                chains.append((parent, chain := []))
            chain.append(name)
            growing[name] = chain
        return Snapshot(self._next_number, tuple([BlocksStored(parent, tuple(chain)) for parent, chain in chains]))

    def check_integrity(self) -> None:
        """Raises AssertionError unless every table says the same, and just those blocks are told that have all before them."""
        linked = [block for siblings in self._children.values() for block in siblings.values()]
        assert sorted(map(id, linked)) == sorted(map(id, self._blocks.values()))
        for parent, siblings in self._children.items():
            assert siblings
            for name, block in siblings.items():
                assert (block.name, block.parent) == (name, parent)
                assert (name in self._told) == (parent == ROOT or parent in self._told)
        seen = {ROOT}
        for name, parent in self._told.items():
            assert parent in seen
            assert name in self._children[parent]
            seen.add(name)
        assert len(linked) <= self._most_blocks

    def _store(self, event: EngineStored) -> None:
        parent, names = self._names(event)
        self.unnamed += len(event.block_hashes) - len(names)
        for position, (key, name) in enumerate(zip(event.block_hashes, names, strict=False)):
            block = self._blocks.get(key)
            if block is None:
                block = self._add(key, name, parent)
            if block is None or block.name != name:
                self.unnamed += len(names) - position
                return
            parent = block

    def _names(self, event: EngineStored) -> tuple[_Block | None, list[bytes]]:
        """The block before these, and their names; fewer than there are blocks, where some have none."""
        reason = _why_unnamed(event, self._block_size)
        if reason:
            self._log_once(reason)
            return None, []
        parent = None
        if event.parent_block_hash is not None:
            parent = self._blocks.get(event.parent_block_hash)
            if parent is None:
                return None, []
        try:
            names = block_hashes(event.token_ids, self._block_size, ROOT if parent is None else parent.name)  # type: ignore[arg-type]
        except (TypeError, OverflowError):
            self._log_once("token ids that are pairs, or no token ids at all")
            return None, []
        if event.extra_keys:
            depends = [index for index, keys in enumerate(event.extra_keys) if keys]
            names = names[: depends[0]] if depends else names
        return parent, names

    def _add(self, key: EngineHash, name: bytes, parent: _Block | None) -> _Block | None:
        """None where there is no room, or where another block of the engine has this name: then one of the two depends on more than tokens,
        and the engine does not say on what."""
        block = _Block(name, ROOT if parent is None else parent.name)
        siblings = self._children.get(block.parent, {})
        if name in siblings or len(self._blocks) >= self._most_blocks:
            return None
        siblings[name] = self._blocks[key] = block
        self._children[block.parent] = siblings
        if parent is None or parent.name in self._told:
            self._tell(block)
        return block

    def _tell(self, first: _Block) -> None:
        """It is there, and so is what had to wait for it."""
        stack = [first]
        while stack:
            block = stack.pop()
            self._told[block.name] = block.parent
            self._telling.stored(block)
            stack.extend(self._children.get(block.name, {}).values())

    def _remove(self, event: EngineRemoved) -> None:
        if not _is_on_device(event):
            return
        for key in event.block_hashes:
            block = self._blocks.pop(key, None)
            if block is None:
                continue
            siblings = self._children[block.parent]
            del siblings[block.name]
            if not siblings:
                del self._children[block.parent]
            self.removed += 1
            if block.name in self._told:
                self._take_back(block)

    def _take_back(self, first: _Block) -> None:
        stack = [first]
        while stack:
            block = stack.pop()
            del self._told[block.name]
            self._telling.removed(block)
            stack.extend(self._children.get(block.name, {}).values())

    def _clear(self) -> None:
        self._blocks.clear()
        self._children.clear()
        self._told.clear()
        self._telling.cleared()

    def _take(self) -> KvEvents:
        events = self._telling.events()
        self._telling = _Telling()
        taken = KvEvents(self._next_number, events)
        self._next_number += len(events)
        return taken

    def _log_once(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning("the engine has cached blocks that no request is routed by: those with %s", reason)


def _why_unnamed(event: EngineStored, block_size: int) -> str | None:
    """What keeps all blocks of an event from having a name, if anything does."""
    if not _is_on_device(event) or event.kv_cache_spec_kind not in WHOLE_KINDS:
        return "a place other than the device, or attention that does not look at every position"
    if (event.lora_id, event.lora_name, event.cache_salt) != (None, None, None):
        return "an adapter or a salt"
    if event.block_size != block_size or len(event.token_ids) != len(event.block_hashes) * block_size:
        return f"other than {block_size} tokens each"
    return None


def _is_on_device(event: EngineStored | EngineRemoved) -> bool:
    """Groups beyond the first are of layers with a cache of another kind; the first has what every prefix needs."""
    return event.medium in DEVICE_MEDIA and event.group_idx in (None, 0) and event.locality in (None, "LOCAL")
