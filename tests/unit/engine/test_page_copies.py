"""Pages are copied to host slots and back, byte for byte, and no page is lost that is given away while it is saved."""

from __future__ import annotations

import mmap
import random

import pytest
import torch

from penstock.engine.attention import KVStore
from penstock.engine.host_slots import HostSlots
from penstock.engine.page_copies import Pace, PageCopies
from penstock.engine.page_memory import checksum
from penstock.engine.shape import ModelShape

CPU = torch.device("cpu")
SHAPES = [
    ModelShape(64, 3, 4, 2, 16, 64, 64, 512),
    ModelShape(64, 1, 4, 1, 8, 64, 64, 512),
    ModelShape(64, 5, 8, 8, 24, 64, 64, 512),
]


def make_store(shape: ModelShape, dtype: torch.dtype = torch.float32, pages: int = 40, page_size: int = 16) -> KVStore:
    """A store full of random bytes."""
    store = KVStore(shape, pages, page_size, dtype, CPU)
    store.strips.random_(-(2**62), 2**62, generator=torch.Generator().manual_seed(7))
    return store


def bytes_of(store: KVStore, page: int) -> bytes:
    """A page by the definition of a slot: the keys of all layers, then the values."""
    strips = [kind[layer, page] for kind in (store.keys, store.values) for layer in range(len(kind))]
    return b"".join(strip.contiguous().view(torch.uint8).numpy().tobytes() for strip in strips)


def run(copies: PageCopies) -> None:
    while copies.is_busy:
        copies.wait()
        copies.poll()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_pages_come_back_as_they_were(shape: ModelShape, dtype: torch.dtype) -> None:
    store = make_store(shape, dtype)
    slots = HostSlots(store, 32)
    copies = PageCopies(store, slots)
    numbers = random.Random(shape.layers)
    pages, places = numbers.sample(range(40), 20), numbers.sample(range(32), 20)
    before = {page: bytes_of(store, page) for page in range(40)}
    ended: list[str] = []
    copies.save(pages, places, lambda: ended.append("saved"))
    run(copies)
    assert [bytes(slots.views(place)[0]) for place in places] == [before[page] for page in pages]
    targets = numbers.sample(range(40), 20)
    copies.load(places, targets, lambda: ended.append("loaded"))
    run(copies)
    assert ended == ["saved", "loaded"]
    wanted = before | {target: before[page] for page, target in zip(pages, targets, strict=True)}
    assert {page: bytes_of(store, page) for page in range(40)} == wanted
    copies.close()


def test_a_page_may_be_given_away_as_soon_as_its_save_is_queued() -> None:
    store = make_store(SHAPES[0])
    copies = PageCopies(store, HostSlots(store, 40))
    before = [bytes_of(store, page) for page in range(8)]
    ended: list[int] = []
    for page in range(8):
        copies.save([page], [page], lambda page=page: ended.append(page))  # type: ignore[misc]
    copies.protect([30, 31])
    copies.poll()
    assert ended == []
    copies.protect([3, 5])
    store.wipe([3, 5])
    copies.poll()
    assert ended == [0, 1, 2, 3, 4, 5]
    run(copies)
    assert [bytes(copies.slots.views(slot)[0]) for slot in range(8)] == before
    copies.protect([3, 5])
    copies.close()


def test_the_owner_is_told_when_all_of_a_copy_has_ended() -> None:
    store = make_store(SHAPES[0])
    copies = PageCopies(store, HostSlots(store, 40))
    ended: list[str] = []
    copies.save(range(10), range(10), lambda: ended.append("first"))
    copies.save([], [], lambda: ended.append("nothing"))
    copies.poll()
    assert ended == []
    copies.start(0.001)
    copies.poll()
    assert ended == ["first", "nothing"]
    assert not copies.is_busy
    assert copies.load_rate > 0
    copies.close()


def test_a_copy_that_is_larger_than_a_step_has_room_for_goes_on_in_the_next() -> None:
    """On a GPU: on a CPU all is copied at once, so this asks the part that both share."""
    store = make_store(SHAPES[0])
    copies = PageCopies(store, HostSlots(store, 40))
    before = [bytes_of(store, page) for page in range(12)]
    ended: list[str] = []
    copies.save(range(10), range(10), lambda: ended.append("first"))
    copies.save([10, 11], [20, 10], lambda: ended.append("second"))
    for pages, known in ((4, []), (0, []), (5, []), (2, ["first"]), (9, ["first", "second"])):
        copies._saves.start(pages)
        copies.poll()
        assert ended == known
    assert [bytes(copies.slots.views(slot)[0]) for slot in (*range(10), 20, 10)] == before
    copies.close()


def test_copies_take_their_share_of_the_time_and_no_more() -> None:
    pace = Pace(0.25)
    pace.seconds_per_page = 0.001
    assert pace.room(0.040, 0) == 10
    assert pace.room(0.040, 4) == 6
    assert pace.room(0.040, 12) == 0
    # Nothing is saved up, and nothing waits for ever: a page that takes longer than the share is copied alone.
    assert pace.room(0.002, 0) == 1
    assert pace.room(0.0, 0) == 1
    assert pace.room(0.002, 1) == 0


def test_small_shares_are_saved_up() -> None:
    pace = Pace(0.1, 0.0025)
    pace.seconds_per_page = 0.0001
    # Two steps of 10 ms have 2 ms for copies, the third makes it enough; then it begins again.
    assert [pace.room(0.010, 0) for _ in range(6)] == [0, 0, 25, 0, 0, 25]
    # A long step has its whole share, and no more than that.
    assert [pace.room(0.010, 0), pace.room(0.100, 0), pace.room(0.010, 0)] == [0, 100, 0]


def test_making_copies_changes_no_page() -> None:
    store = make_store(SHAPES[1])
    before = store.strips.clone()
    PageCopies(store, HostSlots(store, 50)).close()
    assert torch.equal(store.strips, before)


def test_slots_are_memory_that_another_process_can_map() -> None:
    store = make_store(SHAPES[1])
    slots = HostSlots(store, 4)
    slots.views(2)[0][:5] = b"hello"
    with mmap.mmap(slots.file, 0) as mapped:
        start = slots.layout.starts[0] + 2 * slots.layout.strip_bytes
        assert mapped[start : start + 5] == b"hello"
        assert len(mapped) == 4 * slots.layout.slot_bytes
    slots.close()
    # Once is enough.
    slots.close()


def test_a_checksum_knows_every_word_and_its_place() -> None:
    words = bytearray(random.Random(3).randbytes(4096))
    whole = checksum([memoryview(words)])
    assert 0 <= whole < 2**64
    # The strips of a page on a CPU and the one strip of a host slot.
    assert checksum([memoryview(words)[:1024], memoryview(words)[1024:]]) == whole
    for place in range(0, 4096, 8):
        changed = bytearray(words)
        changed[place + place // 8 % 8] ^= 1 << place // 64 % 8
        assert checksum([memoryview(changed)]) != whole
    swapped = words[8:16] + words[:8] + words[16:]
    assert checksum([memoryview(swapped)]) != whole
    assert checksum([memoryview(bytearray(64))]) == 0
