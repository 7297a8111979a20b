"""The published blocks are always true, numbered, and complete from the first block on."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.external.kv_events import (
    BlockMirror,
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
    decode_batch,
)
from penstock.kv.blocks import block_hashes, tenant_root
from penstock.wire.messages import BlocksCleared, BlocksRemoved, BlocksStored, KvEvents, Tier
from replayed_events import apply_events

SIZE = 4
TOKENS = tuple(range(100, 100 + 4 * SIZE))
NAMES = block_hashes(TOKENS, SIZE)
ALICE = tenant_root("alice")


class Listener:
    """A mirror, and the state that a reader of its events has."""

    def __init__(self, max_blocks: int = 1000) -> None:
        self.mirror = BlockMirror(SIZE, max_blocks)
        self.blocks: set[bytes] = set()
        self.roots = {b""}
        self.next_number = 0

    def apply(self, *events: EngineEvent) -> KvEvents:
        return self.hear(self.mirror.apply(events))

    def hear(self, told: KvEvents) -> KvEvents:
        assert told.first == self.next_number
        self.next_number += len(told.events)
        apply_events(self.blocks, told.events, self.roots)
        self.check()
        return told

    def check(self) -> None:
        self.mirror.check_integrity()
        assert self.mirror.cached == len(self.blocks)
        snapshot = self.mirror.snapshot()
        assert snapshot.next_number == self.next_number
        from_nothing: set[bytes] = set()
        apply_events(from_nothing, snapshot.events, self.roots)
        assert from_nothing == self.blocks


@pytest.fixture
def listener() -> Listener:
    return Listener()


def stored(keys: Sequence[EngineHash], tokens: Sequence[int] = TOKENS, parent: EngineHash | None = None, **others: Any) -> EngineStored:
    fields = {"block_size": SIZE, "medium": "GPU", **others}
    return msgspec.convert(
        {
            "type": "BlockStored",
            "block_hashes": list(keys),
            "token_ids": list(tokens[: len(keys) * SIZE]),
            "parent_block_hash": parent,
            **fields,
        },
        EngineStored,
    )


def removed(*keys: EngineHash, **others: Any) -> EngineRemoved:
    return msgspec.convert({"type": "BlockRemoved", "block_hashes": list(keys), **others}, EngineRemoved)


def test_names_are_made_from_tokens(listener: Listener) -> None:
    told = listener.apply(stored([1, 2, 3]))
    assert told == KvEvents(0, (BlocksStored(b"", tuple(NAMES[:3])),))
    assert listener.apply(stored([-4], TOKENS[3 * SIZE :], parent=3)) == KvEvents(1, (BlocksStored(NAMES[2], (NAMES[3],)),))
    assert listener.blocks == set(NAMES)


def test_hashes_of_any_kind_are_only_keys(listener: Listener) -> None:
    listener.apply(stored([-(2**63), 2**64 - 1, b"a whole digest", 0]))
    assert listener.blocks == set(NAMES)
    listener.apply(removed(b"a whole digest"), removed(0))
    assert listener.blocks == set(NAMES[:2])


def test_a_block_stored_twice_is_published_once(listener: Listener) -> None:
    listener.apply(stored([1, 2]))
    assert listener.apply(stored([1, 2])).events == ()
    assert listener.apply(stored([1, 2, 3])).events == (BlocksStored(NAMES[1], (NAMES[2],)),)
    # The first removal counts: whether the second announcement was of a second copy, nobody says.
    listener.apply(removed(3))
    assert listener.blocks == set(NAMES[:2])
    assert listener.apply(removed(3)).events == ()
    assert listener.mirror.removed == 1


def test_removal_of_an_unknown_block_is_ignored(listener: Listener) -> None:
    listener.apply(stored([1]))
    assert listener.apply(removed(7, 8)).events == ()
    assert listener.mirror.removed == 0


def test_blocks_after_an_unknown_one_have_no_name(listener: Listener) -> None:
    assert listener.apply(stored([2, 3], parent=1), stored([4], parent=3)).events == ()
    assert listener.mirror.unnamed == 3


def test_blocks_after_a_hole_are_withdrawn_until_it_is_filled(listener: Listener) -> None:
    """A router finds the last block by bisection: it must not find a block whose predecessors are gone."""
    listener.apply(stored([1, 2, 3, 4]))
    told = listener.apply(removed(2))
    assert told.events == (BlocksRemoved((NAMES[1], NAMES[2], NAMES[3])),)
    assert listener.apply(removed(4)).events == ()
    assert listener.apply(stored([1, 2])).events == (BlocksStored(NAMES[0], (NAMES[1], NAMES[2])),)
    assert listener.blocks == set(NAMES[:3])
    assert listener.mirror.removed == 2


def test_a_block_stored_after_a_hole_waits(listener: Listener) -> None:
    listener.apply(stored([1, 2, 3]), removed(1))
    assert listener.apply(stored([4], TOKENS[3 * SIZE :], parent=3)).events == ()
    listener.apply(stored([1]))
    assert listener.blocks == set(NAMES)


def test_a_clear_drops_the_events_before_it(listener: Listener) -> None:
    listener.apply(stored([1, 2]))
    told = listener.apply(removed(2), EngineCleared(), stored([5]))
    assert told.events == (BlocksCleared(), BlocksStored(b"", (NAMES[0],)))
    # Nothing is behind what was cleared.
    assert listener.apply(stored([3], parent=2)).events == ()


def test_a_missed_event_forgets_all_blocks(listener: Listener) -> None:
    listener.apply(stored([1, 2]))
    assert listener.hear(listener.mirror.forget()).events == (BlocksCleared(),)
    assert listener.apply(removed(1), stored([3], parent=2)).events == ()
    assert listener.mirror.removed == 0


def test_a_snapshot_has_every_chain_in_one_piece(listener: Listener) -> None:
    """In whatever order the blocks came and returned. Branches come after their parents."""
    others = range(500, 500 + 4 * SIZE)
    listener.apply(stored([1]), stored([11], others))
    for place in (1, 2, 3):
        start = place * SIZE
        listener.apply(stored([1 + place], TOKENS[start:], parent=place), stored([11 + place], others[start:], parent=10 + place))
        if place == 2:
            listener.apply(stored([21, 22], others, parent=2), removed(21))
    listener.apply(stored([21], others, parent=2))
    assert listener.mirror.snapshot().events == (
        BlocksStored(b"", tuple(NAMES)),
        BlocksStored(b"", tuple(block_hashes(others, SIZE))),
        BlocksStored(NAMES[1], tuple(block_hashes(others[: 2 * SIZE], SIZE, NAMES[1]))),
    )


@pytest.mark.parametrize(
    "others",
    [
        {"lora_id": 1},
        {"lora_id": 0},
        {"lora_name": "polite"},
        {"lora_name": {"cache_salt": "where SGLang once put it"}},
        {"cache_salt": "pepper"},
        {"extra_keys": [["pepper"], None]},
        {"medium": "EXTERNAL"},
        {"medium": "LORA_POOL"},
        {"locality": "REMOTE"},
        {"group_idx": 1},
        {"kv_cache_spec_kind": "sliding_window"},
        {"kv_cache_spec_kind": "mamba"},
        {"block_size": 2 * SIZE},
        {"block_size": SIZE - 1},
        {"block_size": 0},
        {"token_ids": [[1, 2]] * 2 * SIZE},
        {"token_ids": [-1] * 2 * SIZE},
        {"token_ids": [2**32] * 2 * SIZE},
        {"token_ids": list(TOKENS[: 2 * SIZE - 1])},
        {"token_ids": list(TOKENS[: 3 * SIZE])},
        {"token_ids": []},
    ],
    ids=str,
)
def test_blocks_that_depend_on_more_than_tokens_are_ignored_with_those_after_them(listener: Listener, others: dict[str, Any]) -> None:
    assert listener.apply(stored([1, 2], **others), stored([3], TOKENS[2 * SIZE :], parent=2)).events == ()
    assert listener.mirror.unnamed == 3
    listener.apply(stored([11, 12, 13]))
    assert listener.blocks == set(NAMES[:3])


SALT = ALICE.hex()
ROOTED = block_hashes(TOKENS, SIZE, ALICE)


@pytest.mark.parametrize("salt", [{"cache_salt": SALT}, {"extra_keys": [[SALT], None]}], ids=["SGLang", "vLLM"])
def test_a_salt_of_ours_is_the_root(listener: Listener, salt: dict[str, Any]) -> None:
    """SGLang has the salt in every event, vLLM among the keys of the first block."""
    listener.roots.add(ALICE)
    assert listener.apply(stored([1, 2], **salt)) == KvEvents(0, (BlocksStored(ALICE, tuple(ROOTED[:2])),))
    following = {} if "extra_keys" in salt else salt
    listener.apply(stored([3], TOKENS[2 * SIZE :], parent=2, **following), stored([11, 12, 13]))
    assert listener.blocks == {*ROOTED[:3], *NAMES[:3]}
    assert {event.parent for event in listener.mirror.snapshot().events if isinstance(event, BlocksStored)} == {b"", ALICE}
    listener.apply(removed(1))
    assert listener.blocks == set(NAMES[:3]), "each root has its own"
    listener.apply(stored([1], **salt))
    assert listener.blocks == {*ROOTED[:3], *NAMES[:3]}


@pytest.mark.parametrize(
    "keys", [[SALT, ["image", 3]], [["image", 3]], [SALT[:-2]], [SALT.upper()], [SALT + "00"], ["x" * 32], [5]], ids=str
)
def test_other_keys_of_a_first_block_are_no_root(listener: Listener, keys: list[Any]) -> None:
    assert listener.apply(stored([1, 2], extra_keys=[keys, None])).events == ()
    assert listener.mirror.unnamed == 2


def test_a_salt_in_the_middle_is_no_root(listener: Listener) -> None:
    listener.apply(stored([1]))
    assert listener.apply(stored([2], TOKENS[SIZE:], parent=1, extra_keys=[[SALT]])).events == ()


def test_an_image_after_a_salt(listener: Listener) -> None:
    listener.roots.add(ALICE)
    listener.apply(stored([1, 2, 3], extra_keys=[[SALT], None, [["image", 3]]]))
    assert listener.blocks == set(ROOTED[:2])


@pytest.mark.parametrize(
    "others", [{}, {"medium": None}, {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}, {"extra_keys": [None]}], ids=str
)
def test_default_values_do_not_prevent_a_name(listener: Listener, others: dict[str, Any]) -> None:
    listener.apply(stored([1], **others))
    assert listener.blocks == {NAMES[0]}


def test_blocks_before_an_image_have_names(listener: Listener) -> None:
    listener.apply(stored([1, 2, 3, 4], extra_keys=[None, [], [["image", 3]], None]))
    assert listener.blocks == set(NAMES[:2])
    assert listener.mirror.unnamed == 2


@pytest.mark.parametrize("others", [{"medium": "CPU"}, {"group_idx": 1}, {"locality": "REMOTE"}], ids=str)
def test_a_removal_from_another_medium_is_ignored(listener: Listener, others: dict[str, Any]) -> None:
    listener.apply(stored([1]))
    assert listener.apply(removed(1, **others)).events == ()
    assert listener.apply(removed(1, medium="GPU", group_idx=0, locality="LOCAL")).events == (BlocksRemoved((NAMES[0],)),)


@pytest.mark.parametrize(
    ("medium", "tier"), [("CPU", "host"), ("cpu", "host"), ("CPU_PINNED", "host"), ("DISK", "disk"), ("STORAGE", "disk")]
)
def test_blocks_of_lower_tiers_are_told_apart(medium: str, tier: Tier) -> None:
    """SGLang and vLLM name a block's tokens again; vLLM may leave them out. The engine evicts from the device what it has below."""
    mirror = BlockMirror(SIZE)
    mirror.apply([stored([1, 2, 3])])
    below = stored([2, 3], TOKENS[SIZE:], parent=1, medium=medium)
    assert mirror.apply([below]).events == (BlocksStored(NAMES[0], tuple(NAMES[1:3]), tier),)
    assert mirror.apply([below, stored([2], token_ids=[], block_size=0, medium=medium)]).events == ()
    assert mirror.apply([removed(2, 3, medium="GPU")]).events == (BlocksRemoved(tuple(NAMES[1:3])),)
    assert (mirror.cached, mirror.count(tier)) == (1, 2)
    assert mirror.snapshot().events == (BlocksStored(b"", (NAMES[0],)), BlocksStored(NAMES[0], tuple(NAMES[1:3]), tier))
    mirror.check_integrity()
    # It comes back to the device, from below.
    assert mirror.apply([stored([2], TOKENS[SIZE:], parent=1)]).events == (BlocksStored(NAMES[0], (NAMES[1],)),)
    mirror.apply([removed(1)])
    assert (mirror.cached, mirror.count(tier)) == (0, 0), "without its first block, nothing can be used"
    mirror.check_integrity()
    mirror.apply([stored([1], medium=medium)])
    assert (mirror.cached, mirror.count(tier)) == (1, 3)
    mirror.check_integrity()
    assert mirror.apply([removed(2, medium=medium), removed(3, medium=medium)]).events == (BlocksRemoved(tuple(NAMES[1:3]), tier),)
    assert (mirror.cached, mirror.count(tier)) == (1, 1)
    assert mirror.removed == 3


def test_a_block_without_tokens_is_known_from_the_device_or_not_at_all() -> None:
    mirror = BlockMirror(SIZE)
    nameless = stored([1], token_ids=[], block_size=0, medium="CPU")
    assert mirror.apply([nameless]).events == ()
    assert mirror.unnamed == 1
    mirror.apply([stored([1])])
    assert mirror.apply([nameless]).events == (BlocksStored(b"", (NAMES[0],), "host"),)
    assert mirror.apply([removed(1)]).events == (BlocksRemoved((NAMES[0],)),)
    assert mirror.apply([EngineCleared()]).events == (BlocksCleared(),)
    assert mirror.count("host") == 0


def test_a_second_block_with_the_same_name_is_ignored(listener: Listener) -> None:
    """The engine hashes a namespace but does not report it, so it is unknown which of the two a request would find."""
    listener.apply(stored([1, 2]))
    assert listener.apply(stored([11, 12]), stored([13], TOKENS[2 * SIZE :], parent=12)).events == ()
    assert listener.mirror.unnamed == 3
    listener.apply(removed(1), removed(11))
    assert listener.blocks == set()


def test_one_hash_for_two_blocks_ends_the_chain(listener: Listener) -> None:
    listener.apply(stored([1]))
    assert listener.apply(stored([2, 1, 3], TOKENS[SIZE:])).events == (
        BlocksStored(b"", tuple(block_hashes(TOKENS[SIZE : 2 * SIZE], SIZE))),
    )
    assert listener.mirror.unnamed == 2


def test_there_is_a_bound() -> None:
    listener = Listener(max_blocks=3)
    listener.apply(stored([1, 2, 3, 4]))
    assert listener.blocks == set(NAMES[:3])
    assert listener.mirror.unnamed == 1
    listener.apply(removed(3), stored([3, 4], TOKENS[2 * SIZE :], parent=2))
    assert listener.blocks == set(NAMES[:3])


def test_why_blocks_are_ignored_is_logged_once(listener: Listener, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for key in range(5):
            listener.apply(stored([key], block_size=2), stored([key], lora_id=3))
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [
        "those with other than 4 tokens each",
        "those with an adapter",
    ]


class TruthfulEngine:
    """A cache like those of the engines, and its events: blocks of several sequences, each reported once or more often."""

    def __init__(self, random_source: random.Random) -> None:
        self.random = random_source
        self.cached: dict[int, tuple[int, ...]] = {}

    def key(self, tokens: tuple[int, ...]) -> int:
        return hash(tokens)

    def store(self) -> EngineEvent:
        tokens: tuple[int, ...] = ()
        for _ in range(self.random.randrange(1, 5)):
            tokens += (self.random.randrange(3),) * SIZE
        prefixes = [tokens[:end] for end in range(SIZE, len(tokens) + 1, SIZE)]
        start = 0
        while start < len(prefixes) - 1 and self.key(prefixes[start]) in self.cached and self.random.random() < 0.6:
            start += 1
        new = prefixes[start:]
        self.cached.update({self.key(prefix): prefix for prefix in new})
        parent = self.key(prefixes[start - 1]) if start else None
        return stored([self.key(prefix) for prefix in new], tokens[start * SIZE :], parent)

    def remove(self) -> EngineEvent:
        keys = self.random.sample(sorted(self.cached), min(len(self.cached), self.random.randrange(1, 4)))
        for key in keys:
            del self.cached[key]
        return removed(*keys, self.random.randrange(2**40))

    def act(self) -> EngineEvent:
        chosen = self.random.random()
        if chosen < 0.03:
            self.cached.clear()
            return EngineCleared()
        return self.remove() if chosen < 0.45 else self.store()

    def usable(self) -> set[bytes]:
        """The names of blocks that have all blocks before them."""
        names = set()
        for tokens in self.cached.values():
            if all(self.key(tokens[:end]) in self.cached for end in range(SIZE, len(tokens), SIZE)):
                names.add(block_hashes(tokens, SIZE)[-1])
        return names


@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_the_published_blocks_are_those_of_the_engine(random_source: random.Random, steps: int) -> None:
    engine, listener = TruthfulEngine(random_source), Listener()
    for _ in range(steps):
        listener.apply(*[engine.act() for _ in range(random_source.randrange(1, 5))])
        assert listener.blocks == engine.usable()


@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_after_a_gap_never_too_many_blocks_are_published(random_source: random.Random, steps: int) -> None:
    engine, listener = TruthfulEngine(random_source), Listener()
    for _ in range(steps):
        event = engine.act()
        if random_source.random() < 0.1:
            listener.hear(listener.mirror.forget())
        else:
            listener.apply(event)
        assert listener.blocks <= engine.usable()


MAP = {"type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 4, "lora_id": None}


@pytest.mark.parametrize(
    "event",
    [
        MAP,
        {**MAP, "medium": "GPU", "lora_name": None, "extra_keys": [None], "group_idx": 0, "session_id": "s", "of the future": {"a": 1}},
        ["BlockStored", [5], None, [1, 2, 3, 4], 4, None],
        ["BlockStored", [5], None, [1, 2, 3, 4], 4, None, "GPU"],
        ["BlockStored", [5], None, [1, 2, 3, 4], 4, None, "GPU", None, [None], 0, "full_attention", None],
    ],
    ids=str,
)
def test_every_version_of_a_stored_event_is_read(listener: Listener, event: object) -> None:
    batch = decode_batch(msgspec.msgpack.encode([1.5, [event], 0]))
    assert batch.rank == 0
    listener.apply(*batch.events)
    assert listener.blocks == set(block_hashes([1, 2, 3, 4], SIZE))


def test_every_version_of_the_other_events_is_read() -> None:
    new = decode_batch(msgspec.msgpack.encode([1, [{"type": "BlockRemoved", "block_hashes": [-5]}, {"type": "AllBlocksCleared"}]]))
    old = decode_batch(msgspec.msgpack.encode([1, [["BlockRemoved", [-5]], ["AllBlocksCleared"]]]))
    assert new.rank is None
    for batch in (new, old):
        gone, cleared = batch.events
        assert isinstance(gone, EngineRemoved)
        assert gone.block_hashes == [-5]
        assert isinstance(cleared, EngineCleared)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode("words"),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, [{**MAP, "block_hashes": ["5"]}]]),
        msgspec.msgpack.encode([1.0, [{**MAP, "token_ids": None}]]),
        msgspec.msgpack.encode([1.0, [MAP, {"type": "BlockPainted"}]]),
        msgspec.msgpack.encode([1.0, [["BlockStored", [5], None]]]),
        msgspec.msgpack.encode([1.0, [{**MAP, "medium": "GPU"}]]).replace(b"GPU", b"\xff\xff\xff"),
        b"\x92\x01\x91\x8f\xa4type\xabBlockStored\xa7lora_id" + b"\x91" * 100_000,
        b"\x92\x01\x91\x96\xabBlockStored\x91\x05\xc0\x91\x01\x04" + b"\x91" * 100_000,
    ],
    ids=range(11),
)
def test_other_bytes_are_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        decode_batch(payload)
