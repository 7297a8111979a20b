"""The KV events of vLLM and SGLang, and what they mean as Penstock's own blocks. Pure: no I/O."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from penstock.kv.blocks import NAME_BYTES, ROOT, block_hashes
from penstock.wire.messages import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEvents, Snapshot

log = logging.getLogger(__name__)

# A router keeps at most as many blocks of one worker.
MAX_BLOCKS = 1_000_000

# None: the engine has only one place for blocks. Both engines write GPU for any device.
DEVICE_MEDIA = (None, "GPU")
# The kinds of attention that read every position. With other kinds, a block does not imply the blocks before it.
WHOLE_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")

EngineHash = int | bytes
"""The engine's name of a block: 64 bits (signed in SGLang, unsigned in vLLM) or vLLM's whole digest. It is only compared."""


class EngineStored(Struct, frozen=True, tag="BlockStored"):
    """Blocks that the engine has cached, each after the one before it.

    The order of the fields counts: older versions send them as arrays. There SGLang has its metadata in the place of vLLM's `lora_name`.
    With speculative decoding SGLang sends pairs as tokens.
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
    """Blocks that the engine has evicted; in vLLM perhaps only one of several copies."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class EngineCleared(Struct, frozen=True, tag="AllBlocksCleared"):
    """The engine has emptied its cache."""


EngineEvent = EngineStored | EngineRemoved | EngineCleared


class EngineBatch(Struct, frozen=True, array_like=True):
    """The changes of one step. `rank` is the data-parallel replica; each has its own cache."""

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
    """Raises ValueError for bytes that are not a batch. Both engines send events as maps; their older versions sent arrays."""
    try:
        return _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            old = _POSITIONAL_DECODER.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ValueError(str(error)) from error
    return EngineBatch(old.at, list(old.events), old.rank)


_SALT = re.compile(f"[0-9a-f]{{{2 * NAME_BYTES}}}")


def salt_of(root: bytes) -> str | None:
    """The engine's salt for requests with this root. None for the shared root."""
    return root.hex() or None


class _Block(NamedTuple):
    """A block that the engine has. It is published while all blocks before it are there, too. The parent of a first block is its root."""

    name: bytes
    parent: bytes
    is_first: bool


class _EventBuilder:
    """Collects events. Blocks that follow each other become one event, and so do removals."""

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
        """Drops the events before it."""
        self._events = []
        self._starts_cleared = True

    def events(self) -> tuple[KvEvent, ...]:
        events: list[KvEvent] = [BlocksCleared()] if self._starts_cleared else []
        for parent, names in self._events:
            events.append(BlocksRemoved(tuple(names)) if parent is None else BlocksStored(parent, tuple(names)))
        return tuple(events)


class BlockMirror:
    """The blocks that an engine has cached, with the engine's hashes translated to the names that routers know.

    A name depends only on the root, which is the engine's salt, and on tokens. A block gets no name if its KV depends on more (an adapter,
    an image, a salt of others), if it is not on the device, if it does not have `block_size` tokens, or if its parent is unknown. Such
    blocks and those after them are ignored; `unnamed` counts them.

    The engine may have more blocks than are published, never fewer, except for events on their way. vLLM can have several copies of a
    block and reports each as stored and removed, but it may report one copy twice as stored. So the first removal counts. Blocks after a
    removed block are published as removed, too: a router that finds a block assumes the ones before it. They are remembered, and
    published again if the block returns.
    """

    def __init__(self, block_size: int, max_blocks: int = MAX_BLOCKS) -> None:
        self.removed = 0
        self.unnamed = 0
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._next_number = 0
        self._blocks: dict[EngineHash, _Block] = {}
        # By the name of the parent, which may be missing, then by name.
        self._children: dict[bytes, dict[bytes, _Block]] = {}
        # The published names, each with its parent's name. Parents come before children.
        self._published: dict[bytes, bytes] = {}
        self._builder = _EventBuilder()
        self._logged: set[str] = set()

    @property
    def cached(self) -> int:
        """The number of published blocks."""
        return len(self._published)

    def apply(self, events: Sequence[EngineEvent]) -> KvEvents:
        """Applies the engine's events. Returns our events for them, perhaps none."""
        for event in events:
            match event:
                case EngineStored():
                    self._store(event)
                case EngineRemoved():
                    self._remove(event)
                case EngineCleared():
                    self._clear()
        taken = KvEvents(self._next_number, self._builder.events())
        self._builder = _EventBuilder()
        self._next_number += len(taken.events)
        return taken

    def forget(self) -> KvEvents:
        """Forgets all blocks, because an event was missed."""
        return self.apply([EngineCleared()])

    def snapshot(self) -> Snapshot:
        """All published blocks, parents before children. There may be hundreds of thousands and the event loop waits, so this is one pass
        in their order, without lookups."""
        chains: list[tuple[bytes, list[bytes]]] = []
        # Chains by the name of their last block.
        growing: dict[bytes, list[bytes]] = {}
        for name, parent in self._published.items():
            chain = growing.pop(parent, None)
            if chain is None:
                chains.append((parent, chain := []))
            chain.append(name)
            growing[name] = chain
        return Snapshot(self._next_number, tuple([BlocksStored(parent, tuple(chain)) for parent, chain in chains]))

    def check_integrity(self) -> None:
        """Raises AssertionError unless the tables agree, and exactly the blocks with all blocks before them are published."""
        linked = [block for siblings in self._children.values() for block in siblings.values()]
        assert sorted(map(id, linked)) == sorted(map(id, self._blocks.values()))
        for parent, siblings in self._children.items():
            assert siblings
            for name, block in siblings.items():
                assert (block.name, block.parent) == (name, parent)
                assert (name in self._published) == (block.is_first or parent in self._published)
        seen = {block.parent for block in linked if block.is_first}
        for name, parent in self._published.items():
            assert parent in seen
            assert name in self._children[parent]
            seen.add(name)
        assert len(linked) <= self._max_blocks

    def _store(self, event: EngineStored) -> None:
        parent, names = self._names(event)
        is_first = event.parent_block_hash is None
        self.unnamed += len(event.block_hashes) - len(names)
        for position, (key, name) in enumerate(zip(event.block_hashes, names, strict=False)):
            block = self._blocks.get(key)
            if block is None:
                block = self._add(key, _Block(name, parent, is_first))
            if block is None or block.name != name:
                self.unnamed += len(names) - position
                return
            parent, is_first = block.name, False

    def _names(self, event: EngineStored) -> tuple[bytes, list[bytes]]:
        """The root, or the block before these, and their names. Fewer names than blocks if some have none."""
        salt, extra_keys = _split_salt(event)
        root = _root_of(salt)
        reason = _why_unnamed(event, self._block_size)
        if reason is not None or root is None:
            self._log_once(reason or "a salt of others")
            return ROOT, []
        parent = root
        if event.parent_block_hash is not None:
            before = self._blocks.get(event.parent_block_hash)
            if before is None:
                return ROOT, []
            parent = before.name
        try:
            names = block_hashes(event.token_ids, self._block_size, parent)  # type: ignore[arg-type]
        except (TypeError, OverflowError):
            self._log_once("pairs instead of token ids, or invalid token ids")
            return ROOT, []
        depends = [index for index, keys in enumerate(extra_keys) if keys]
        return parent, names[: depends[0]] if depends else names

    def _add(self, key: EngineHash, block: _Block) -> _Block | None:
        """None if there is no room, or if another block of the engine has this name: then one of the two depends on more than tokens, and
        the engine does not report on what."""
        name, siblings = block.name, self._children.get(block.parent, {})
        if name in siblings or len(self._blocks) >= self._max_blocks:
            return None
        siblings[name] = self._blocks[key] = block
        self._children[block.parent] = siblings
        for following in self._with_following(block) if block.is_first or block.parent in self._published else ():
            self._published[following.name] = following.parent
            self._builder.stored(following)
        return block

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
            for following in self._with_following(block) if block.name in self._published else ():
                del self._published[following.name]
                self._builder.removed(following)

    def _with_following(self, first: _Block) -> Iterator[_Block]:
        """The block and the known blocks after it."""
        stack = [first]
        while stack:
            block = stack.pop()
            yield block
            stack.extend(self._children.get(block.name, {}).values())

    def _clear(self) -> None:
        self._blocks.clear()
        self._children.clear()
        self._published.clear()
        self._builder.cleared()

    def _log_once(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning("some cached blocks of the engine are ignored by the router: those with %s", reason)


def _why_unnamed(event: EngineStored, block_size: int) -> str | None:
    """Why no block of the event can have a name. None if they can."""
    if not _is_on_device(event) or event.kv_cache_spec_kind not in WHOLE_KINDS:
        return "another place than the device, or attention that does not read every position"
    if (event.lora_id, event.lora_name) != (None, None):
        return "an adapter"
    if event.block_size != block_size or len(event.token_ids) != len(event.block_hashes) * block_size:
        return f"other than {block_size} tokens each"
    return None


def _split_salt(event: EngineStored) -> tuple[Any, Sequence[Any]]:
    """The salt of the event's blocks, and what else they depend on. vLLM has the salt among the keys of a sequence's first block."""
    extra_keys = event.extra_keys or []
    if event.cache_salt is None and event.parent_block_hash is None and extra_keys and _is_salt(extra_keys[0]):
        return extra_keys[0][0], [None, *extra_keys[1:]]
    return event.cache_salt, extra_keys


def _is_salt(keys: Any) -> bool:
    return isinstance(keys, list | tuple) and len(keys) == 1 and isinstance(keys[0], str)


def _root_of(salt: Any) -> bytes | None:
    """None for a salt that is not ours."""
    if salt is None:
        return ROOT
    return bytes.fromhex(salt) if isinstance(salt, str) and _SALT.fullmatch(salt) else None


def _is_on_device(event: EngineStored | EngineRemoved) -> bool:
    """Groups after the first are layers with another kind of cache. The first has what every prefix needs."""
    return event.medium in DEVICE_MEDIA and event.group_idx in (None, 0) and event.locality in (None, "LOCAL")
