"""The KV events of vLLM and SGLang, and what they mean as Penstock's own blocks. Pure: no I/O."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import Any, get_args

import msgspec
from msgspec import Struct

from penstock.backends.external.image_events import Cut, KeyedImages
from penstock.kv.blocks import NAME_BYTES, ROOT, block_hashes
from penstock.wire.messages import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEvents, Snapshot, Tier

log = logging.getLogger(__name__)

# A router keeps at most as many blocks of one worker.
MAX_BLOCKS = 1_000_000
# Larger ids are SGLang's for images.
MAX_TOKEN = 2**32 - 1

TIERS: dict[str | None, Tier] = {None: "device", "GPU": "device", "CPU": "host", "CPU_PINNED": "host", "DISK": "disk", "STORAGE": "disk"}
"""Where blocks are, by the engines' word for it in capitals. None: the engine has only one place. Both engines write GPU for any device.
Blocks in other places may be shared with other engines, and are not counted."""
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


@dataclass(slots=True, eq=False)
class _Block:
    """A block that the engine has in these tiers. It is published while all blocks before it are there, too, in any tier. The parent of a
    first block is its root. `cut`: the image that goes on after it."""

    name: bytes
    parent: bytes
    is_first: bool
    cut: Cut | None = None
    tiers: tuple[Tier, ...] = ()


@cache
def _with(tiers: tuple[Tier, ...], tier: Tier) -> tuple[Tier, ...]:
    """One tuple for all blocks: there may be a million."""
    return (*tiers, tier)


class _EventBuilder:
    """Collects events. Blocks of a tier that follow each other become one event, and so do removals."""

    def __init__(self) -> None:
        self._events: list[tuple[Tier, bytes | None, list[bytes]]] = []
        self._starts_cleared = False

    def stored(self, block: _Block, tier: Tier) -> None:
        if self._events:
            last_tier, parent, names = self._events[-1]
            if parent is not None and last_tier == tier and names[-1] == block.parent:
                names.append(block.name)
                return
        self._events.append((tier, block.parent, [block.name]))

    def removed(self, block: _Block, tier: Tier) -> None:
        if not self._events or self._events[-1][:2] != (tier, None):
            self._events.append((tier, None, []))
        self._events[-1][2].append(block.name)

    def cleared(self) -> None:
        """Drops the events before it."""
        self._events = []
        self._starts_cleared = True

    def events(self) -> tuple[KvEvent, ...]:
        events: list[KvEvent] = [BlocksCleared()] if self._starts_cleared else []
        for tier, parent, names in self._events:
            events.append(BlocksRemoved(tuple(names), tier) if parent is None else BlocksStored(parent, tuple(names), tier))
        return tuple(events)


class BlockMirror:
    """The blocks that an engine has cached, with the engine's hashes translated to the names that routers know.

    A name depends only on the root, which is the engine's salt, and on tokens. Some tokens stand for images: `images` finds them in the
    events of vLLM. SGLang makes such tokens from its own hashes, so its names end before the first image. A block gets no name if its KV
    depends on more (an adapter, or an image or salt that is not ours), if it is in none of our tiers, if it does not have `block_size`
    tokens, or if its parent is unknown. Such blocks and the blocks after them are ignored; `unnamed` counts them. vLLM may report a block
    of its host tier without tokens: it is ignored unless it is already known.

    Except for events on their way, the engine has every published block, and perhaps more. vLLM can have several copies of a block and
    reports each as stored and removed, but it may report one copy twice as stored. So the first removal counts for all copies. Blocks after
    a removed block are published as removed, too: a router that finds a block assumes the ones before it. They are remembered, and
    published again if the removed block returns. `removed` counts blocks that left the device.
    """

    def __init__(self, block_size: int, max_blocks: int = MAX_BLOCKS, images: KeyedImages | None = None) -> None:
        self.removed = 0
        self.unnamed = 0
        self._block_size = block_size
        self._images = images
        self._max_blocks = max_blocks
        self._next_number = 0
        self._blocks: dict[EngineHash, _Block] = {}
        # By the name of the parent, which may be missing, then by name.
        self._children: dict[bytes, dict[bytes, _Block]] = {}
        # The published names of each tier, each with its parent's name. Of two in the same tier, the parent comes before the child.
        self._published: dict[Tier, dict[bytes, bytes]] = {tier: {} for tier in get_args(Tier)}
        self._builder = _EventBuilder()
        self._logged: set[str] = set()

    @property
    def cached(self) -> int:
        """The number of published blocks on the device."""
        return self.count("device")

    def count(self, tier: Tier) -> int:
        return len(self._published[tier])

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
        """All published blocks, tier by tier. There may be hundreds of thousands and the event loop waits, so this is one pass in their
        order, without lookups."""
        events = []
        for tier, published in self._published.items():
            chains: list[tuple[bytes, list[bytes]]] = []
            # Chains by the name of their last block.
            growing: dict[bytes, list[bytes]] = {}
            for name, parent in published.items():
                chain = growing.pop(parent, None)
                if chain is None:
                    chains.append((parent, chain := []))
                chain.append(name)
                growing[name] = chain
            events += [BlocksStored(parent, tuple(chain), tier) for parent, chain in chains]
        return Snapshot(self._next_number, tuple(events))

    def check_integrity(self) -> None:
        """Raises AssertionError unless the tables agree, and exactly the blocks with all blocks before them are published."""
        linked = [block for siblings in self._children.values() for block in siblings.values()]
        assert sorted(map(id, linked)) == sorted(map(id, self._blocks.values()))
        for parent, siblings in self._children.items():
            assert siblings
            for name, block in siblings.items():
                assert (block.name, block.parent) == (name, parent)
                assert block.tiers
                is_published = block.is_first or self._is_published(parent)
                for tier, published in self._published.items():
                    assert (name in published) == (is_published and tier in block.tiers)
        for published in self._published.values():
            for name, parent in published.items():
                assert name in self._children[parent]
        assert len(linked) <= self._max_blocks

    def _store(self, event: EngineStored) -> None:
        tier = _tier_of(event)
        if tier in ("host", "disk") and not event.token_ids:
            self._store_known(event, tier)
            return
        parent, names, cuts = self._names(event)
        is_first = event.parent_block_hash is None
        self.unnamed += len(event.block_hashes) - len(names)
        if tier is None:
            return
        for position, (key, name, cut) in enumerate(zip(event.block_hashes, names, cuts, strict=False)):
            block = self._blocks.get(key)
            if block is None:
                block = self._add(key, _Block(name, parent, is_first, cut))
            if block is None or block.name != name:
                self.unnamed += len(names) - position
                return
            self._put(block, tier)
            parent, is_first = block.name, False

    def _store_known(self, event: EngineStored, tier: Tier) -> None:
        for key in event.block_hashes:
            block = self._blocks.get(key)
            if block is None:
                self.unnamed += 1
            else:
                self._put(block, tier)

    def _names(self, event: EngineStored) -> tuple[bytes, list[bytes], Iterable[Cut | None]]:
        """The root, or the block before these, their names, and the images that each of them cuts. Fewer names than blocks if some have
        none."""
        salt, extra_keys = _split_salt(event)
        root = _root_of(salt)
        reason = _why_unnamed(event, self._block_size)
        if reason is not None or root is None:
            self._log_once(reason or "a salt of others")
            return ROOT, [], ()
        parent, cut = root, None
        if event.parent_block_hash is not None:
            before = self._blocks.get(event.parent_block_hash)
            if before is None:
                return ROOT, [], ()
            parent, cut = before.name, before.cut
        try:
            token_ids, cuts = self._our_ids(event, extra_keys, cut)
            names = block_hashes(token_ids, self._block_size, parent)
        except (TypeError, OverflowError):
            self._log_once("pairs instead of token ids, or invalid token ids")
            return ROOT, [], ()
        return parent, names, cuts

    def _our_ids(self, event: EngineStored, extra_keys: Sequence[Any], cut: Cut | None) -> tuple[Sequence[int], Iterable[Cut | None]]:
        """The tokens of those blocks that have names, with our ids for images. Raises TypeError or OverflowError for other
        values than tokens."""
        images, size = self._images, self._block_size
        token_ids: list[int] = event.token_ids  # type: ignore[assignment]
        if images is None or not any(extra_keys):
            named = next((index for index, keys in enumerate(extra_keys) if keys), len(event.block_hashes))
            if max(token_ids, default=0) > MAX_TOKEN:
                self._log_once("images")
                named = min(named, next(index for index, token in enumerate(token_ids) if token > MAX_TOKEN) // size)
            return token_ids[: named * size], repeat(None)
        ids: list[int] = []
        cuts: list[Cut | None] = []
        for index, start in enumerate(range(0, len(token_ids), size)):
            read = images.read(token_ids[start : start + size], extra_keys[index] if index < len(extra_keys) else None, cut)
            if read is None:
                self._log_once("images of others")
                break
            ids += read[0]
            cut = read[1]
            cuts.append(cut)
        return ids, cuts

    def _add(self, key: EngineHash, block: _Block) -> _Block | None:
        """None if there is no room, or if another block of the engine has this name: then one of the two depends on more than tokens, and
        the engine does not report on what."""
        name, siblings = block.name, self._children.get(block.parent, {})
        if name in siblings or len(self._blocks) >= self._max_blocks:
            return None
        siblings[name] = self._blocks[key] = block
        self._children[block.parent] = siblings
        return block

    def _put(self, block: _Block, tier: Tier) -> None:
        """The engine has the block in this tier, too."""
        if tier in block.tiers:
            return
        block.tiers = _with(block.tiers, tier)
        if not block.is_first and not self._is_published(block.parent):
            return
        if len(block.tiers) > 1:
            self._publish(block, tier)
            return
        for following in self._with_following(block):
            for each in following.tiers:
                self._publish(following, each)

    def _publish(self, block: _Block, tier: Tier) -> None:
        self._published[tier][block.name] = block.parent
        self._builder.stored(block, tier)

    def _withdraw(self, block: _Block, tier: Tier) -> None:
        if self._published[tier].pop(block.name, None) is not None:
            self._builder.removed(block, tier)

    def _is_published(self, name: bytes) -> bool:
        return any(name in published for published in self._published.values())

    def _remove(self, event: EngineRemoved) -> None:
        tier = _tier_of(event)
        for key in event.block_hashes if tier is not None else ():
            block = self._blocks.get(key)
            if block is None or tier not in block.tiers:
                continue
            self.removed += tier == "device"
            block.tiers = tuple([each for each in block.tiers if each != tier])
            self._withdraw(block, tier)
            if block.tiers:
                continue
            del self._blocks[key]
            siblings = self._children[block.parent]
            del siblings[block.name]
            if not siblings:
                del self._children[block.parent]
            for following in self._with_following(block):
                for each in following.tiers:
                    self._withdraw(following, each)

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
        for published in self._published.values():
            published.clear()
        self._builder.cleared()

    def _log_once(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning("some cached blocks of the engine are ignored by the router: those with %s", reason)


def _why_unnamed(event: EngineStored, block_size: int) -> str | None:
    """Why no block of the event can have a name. None if they can."""
    if _tier_of(event) is None or event.kv_cache_spec_kind not in WHOLE_KINDS:
        return "a place that other engines share, or attention that does not read every position"
    if (event.lora_id, event.lora_name) != (None, None):
        return "an adapter"
    if event.block_size != block_size or len(event.token_ids) != len(event.block_hashes) * block_size:
        return f"other than {block_size} tokens each"
    return None


def _split_salt(event: EngineStored) -> tuple[Any, Sequence[Any]]:
    """The salt of the event's blocks, and what else they depend on. vLLM has the salt among the keys of a sequence's first block, after
    those of its images."""
    extra_keys = event.extra_keys or []
    if event.cache_salt is None and event.parent_block_hash is None and extra_keys and _ends_with_salt(extra_keys[0]):
        *others, salt = extra_keys[0]
        return salt, [others, *extra_keys[1:]]
    return event.cache_salt, extra_keys


def _ends_with_salt(keys: Any) -> bool:
    """Keys of images are pairs. Of two texts, one is an adapter's name."""
    return isinstance(keys, list | tuple) and [index for index, key in enumerate(keys) if isinstance(key, str)] == [len(keys) - 1]


def _root_of(salt: Any) -> bytes | None:
    """None for a salt that is not ours."""
    if salt is None:
        return ROOT
    return bytes.fromhex(salt) if isinstance(salt, str) and _SALT.fullmatch(salt) else None


def _tier_of(event: EngineStored | EngineRemoved) -> Tier | None:
    """Where the blocks are; None if that is none of our tiers. Groups after the first are layers with another kind of cache. The first has
    what every prefix needs."""
    if event.group_idx not in (None, 0) or event.locality not in (None, "LOCAL"):
        return None
    return TIERS.get(None if event.medium is None else event.medium.upper())
