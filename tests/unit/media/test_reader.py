"""Reading the images of requests: each once, within limits, kept apart by tenant, with errors that name the field."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import gc
import os
import random
import signal
import sys
import termios
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import penstock
from penstock.config.media import DEFAULTS
from penstock.fairness import FairBudget, Share
from penstock.media.cache import MAX_FILES
from penstock.media.child import answer
from penstock.media.decoders import Decoders
from penstock.media.families.simulator import make_rules
from penstock.media.job import Done, Job, Refused
from penstock.media.picture import ImageRef, Picture
from penstock.media.reader import BYTES_PER_PIXEL, MAX_HASHED_AT_ONCE, MediaReader
from penstock.wire.errors import RequestError
from penstock.wire.images import IMAGE_NAME_BYTES, PICTURE_BYTES
from pictures import data_url, noise, saved, sent

RULES = make_rules()
ROOT = b"tenant"
FIELD = "messages[0].content[1].image_url.url"


@pytest.fixture(scope="module")
def decoders() -> Iterator[Decoders]:
    """One process for all tests of this file: it takes a while to start."""
    made = Decoders(1, DEFAULTS.max_bytes, DEFAULTS.max_pixels)
    yield made
    made.close()


@pytest.fixture
def reader(decoders: Decoders) -> MediaReader:
    return MediaReader(decoders=decoders)


async def read(reader: MediaReader, *refs: ImageRef, lane: str = "", root: bytes = ROOT) -> list[Picture]:
    return await reader.read(refs, lane, root, RULES)


async def forget(reader: MediaReader) -> None:
    """Empties the cache. What still lives is held by somebody."""
    # A task holds the future that has just woken it.
    await asyncio.sleep(0)
    while reader.cache.evict():
        pass
    gc.collect()
    reader.check_integrity()


def comment(text: str) -> PngInfo:
    made = PngInfo()
    made.add_text("comment", text)
    return made


async def decoded(reader: MediaReader) -> None:
    """Waits for what is being decoded for nobody: that cannot be stopped."""
    while reader.decoders.turns.used or reader.memory.used != reader.held_bytes:
        await asyncio.sleep(0)
    # The task that has just counted it ends.
    await asyncio.sleep(0)


async def refused(reader: MediaReader, *refs: ImageRef) -> RequestError:
    with pytest.raises(RequestError) as raised:
        await read(reader, *refs)
    await decoded(reader)
    reader.check_integrity()
    return raised.value


async def test_a_picture_is_found_by_its_name_while_somebody_holds_it(reader: MediaReader) -> None:
    pictures = await read(reader, sent(noise()))
    name = pictures[0].name
    assert len(name) == IMAGE_NAME_BYTES
    assert reader.find(name) is pictures[0]
    assert (pictures[0].size, pictures[0].pixels) == ((24, 16), noise().tobytes())
    await forget(reader)
    assert reader.find(name) is pictures[0], "a request holds it"
    assert reader.memory.used == reader.held_bytes == 24 * 16 * 3 + PICTURE_BYTES
    pictures.clear()
    await forget(reader)
    assert reader.find(name) is None
    assert reader.memory.used == reader.held_bytes == len(reader) == 0


async def test_equal_pictures_are_read_once_and_keep_their_order(reader: MediaReader) -> None:
    cat, dog = saved(noise(seed=1)), saved(noise(seed=2))
    pictures = await read(reader, sent(cat), sent(dog), sent(cat), sent(saved(noise(seed=1), "WEBP")))
    assert [picture.pixels for picture in pictures] == [noise(seed=seed).tobytes() for seed in (1, 2, 1, 1)]
    assert pictures[0] is pictures[2] is pictures[3]
    assert len(reader) == 2
    again = await read(reader, ImageRef(FIELD, data=base64.b64encode(cat).decode()))
    assert again[0] is pictures[0]
    assert reader.counts.images["data", "cached"] == 1
    assert reader.counts.bytes["data"] > 5 * len(cat) - 10


class Watched(str):  # noqa: SLOT000
    """A text that notes the longest part that the main thread has taken of it."""

    longest = 0

    def __getitem__(self, key: Any) -> str:
        part = super().__getitem__(key)
        if threading.current_thread() is threading.main_thread():
            self.longest = max(self.longest, len(part))
        return part


async def test_a_file_in_lines_is_joined_beside_the_event_loop(reader: MediaReader) -> None:
    file = saved(noise(size=(400, 300)))
    text = Watched(base64.encodebytes(file).decode())
    pictures = await read(reader, ImageRef(FIELD, data=text), sent(file))
    assert pictures[0] is pictures[1]
    assert text.longest < 1000
    odd = Watched(text + "\u20ac")
    assert "it is not base64" in (await refused(reader, ImageRef(FIELD, data=odd))).message
    assert odd.longest < 1000


async def test_tenants_share_nothing(reader: MediaReader) -> None:
    file = sent(noise())
    pictures = [
        (await read(reader, file, lane=lane, root=root))[0]
        for lane, root in (("a", b"root of a"), ("b", b"root of b"), ("a", b"root of a, with a salt"), ("", b""))
    ]
    assert len({picture.name for picture in pictures}) == 4
    assert reader.counts.images["data", "cached"] == 0
    # Tenants that share prefixes have one root: their KV is shared, but nothing tells one that the other sent the file.
    assert (await read(reader, file, lane="b", root=b"root of a"))[0].name == pictures[0].name
    assert reader.counts.images["data", "cached"] == 0


async def test_rules_and_detail_are_a_part_of_the_name(reader: MediaReader) -> None:
    image = sent(noise(size=(600, 20)))
    names = {
        (await reader.read([ref], "", ROOT, rules))[0].name
        for ref in (image, sent(noise(size=(600, 20)), "low"))
        for rules in (RULES, make_rules(patch_pixels=32), make_rules(max_side=2))
    }
    assert len(names) == 6
    same = await read(reader, image, sent(noise(size=(600, 20)), "high"), sent(noise(size=(600, 20)), "original"))
    assert same[0] is same[1] is same[2]
    small = await read(reader, sent(noise(), "low"), sent(noise(), "high"))
    assert small[0] is small[1], "it fits as it is"


async def test_the_first_errors_are_those_that_cost_least(reader: MediaReader) -> None:
    assert await reader.read([], "", ROOT, RULES) == []
    small = MediaReader(replace(DEFAULTS, max_images=2, max_bytes=1000, max_pixels=100), decoders=reader.decoders)
    many = await refused(small, *[ImageRef(f"messages[{index}]", url="nonsense") for index in range(4)])
    assert (many.param, many.limit) == ("messages[2]", "max_images")
    assert "4 images: expected at most 2" in many.message
    large = await refused(small, sent(bytes(2000)))
    assert (large.param, large.limit) == (FIELD, "max_image_bytes")
    wide = await refused(small, sent(noise("L", (101, 1))))
    assert wide.limit == "max_image_pixels"
    assert "101 × 1 pixels: expected at most 100" in wide.message
    assert small.counts.images == {("data", "refused"): 2}


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", "it begins with ''"),
        ("cat.png", "it begins with 'cat.png'"),
        ("file:///etc/passwd", "it begins with 'file:///etc/passwd'"),
        ("data:image/png,abc", "expected data:image/png;base64"),
        ("data:image/png;base64", "expected data:image/png;base64"),
        ("data:image/png;base64,", "it is empty: expected a PNG"),
        ("data:image/svg+xml;base64,PHN2ZyB4", "it is not a picture: expected a PNG"),
        ("data:image/png;base64,iVBORw0K*", "it is not base64"),
        ("http://example.org/cat.png", "this server fetches no images"),
        ("HTTPS://example.org/cat.png", "this server fetches no images"),
    ],
)
async def test_a_url_without_a_picture_is_refused(reader: MediaReader, url: str, reason: str) -> None:
    error = await refused(reader, sent(noise()), ImageRef("input[1].image_url", url=url))
    assert error.status == 400
    assert reader.counts.images["http" if "http" in url.lower() else "data", "refused"] == 1
    assert error.param == "input[1].image_url"
    assert error.message.startswith("`input[1].image_url` cannot be read: ")
    assert reason in error.message


async def test_a_broken_file_is_refused_and_nothing_is_kept(reader: MediaReader) -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        file = saved(noise(size=(200, 200)), kind)
        error = await refused(reader, sent(noise()), sent(file[: len(file) // 2], field="input[7]"))
        assert (error.param, error.status, error.code) == ("input[7]", 400, "invalid_image")
        assert "broken" in error.message, error.message
        assert " at 0x" not in (await refused(reader, sent(file[:40]))).message, "no address in memory"
    del error  # its traceback holds what was read
    text = base64.b64encode(saved(noise(size=(90, 90)))).decode()
    assert "it is not base64" in (await refused(reader, ImageRef("data", data=text[:300] + "?" + text[301:]))).message
    await forget(reader)
    assert reader.memory.used == 0


@pytest.mark.parametrize("begins_with", [[], [noise(size=(200, 200))], [noise(size=(20, 20))]], ids=["alone", "after one", "before one"])
async def test_a_refused_request_holds_nothing_once_its_error_is_gone(reader: MediaReader, begins_with: list[Image.Image]) -> None:
    """Without the garbage collector, which comes seldom."""
    broken = Watched(base64.b64encode(saved(noise(size=(100, 100)))[:-2000]).decode())
    sent_text = weakref.ref(broken)
    gc.disable()
    try:
        with contextlib.suppress(RequestError):
            await read(reader, *map(sent, begins_with), ImageRef("input[7]", data=broken))
            pytest.fail("it is broken")
        del broken
        await decoded(reader)
        while reader.cache.evict():
            pass
        await asyncio.sleep(0)
        assert (reader.memory.used, sent_text()) == (0, None)
    finally:
        gc.enable()
    assert reader.counts.images["data", "refused"] == 1


async def test_requests_that_send_the_same_file_at_once_share_its_decoding(reader: MediaReader) -> None:
    file = sent(noise(size=(300, 300)))
    pictures = await asyncio.gather(*[read(reader, file) for _ in range(10)])
    assert len({id(picture) for (picture,) in pictures}) == 1
    assert reader.memory.used == reader.held_bytes == 300 * 300 * 3 + PICTURE_BYTES


async def test_one_that_leaves_does_not_take_the_picture_from_others(reader: MediaReader) -> None:
    file = sent(noise(size=(300, 300)))
    first, second = (asyncio.create_task(read(reader, file)) for _ in range(2))
    while not reader.decoders.turns.used:
        await asyncio.sleep(0)
    first.cancel()
    assert len(await second) == 1
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_what_nobody_waits_for_is_given_up(reader: MediaReader) -> None:
    """All turns are taken, so the picture waits, and so does its memory."""
    turn = Share()
    assert reader.decoders.turns.take(turn, 1)
    reading = asyncio.create_task(read(reader, sent(noise())))
    while not reader.decoders.turns.waiting:
        await asyncio.sleep(0)
    assert reader.memory.used > 24 * 16 * BYTES_PER_PIXEL
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    while reader.memory.used:
        await asyncio.sleep(0)
    reader.decoders.turns.release(turn)
    reader.check_integrity()


async def test_the_cache_makes_room_for_what_is_needed(decoders: Decoders) -> None:
    """There is memory for five pictures, or for reading one and keeping two."""
    size = (100, 100)
    pixels = 100 * 100 * 3
    reader = MediaReader(replace(DEFAULTS, memory=100 * 100 * BYTES_PER_PIXEL + 4 * pixels), decoders=decoders)
    for seed in range(8):
        await read(reader, sent(noise("L", size, seed)), lane="a" if seed % 2 else "b")
        assert reader.memory.used <= reader.memory.total
    assert 0 < len(reader.cache) < 5
    await read(reader, sent(noise("L", size, 7)), lane="a")
    assert reader.counts.images["data", "cached"] == 1, "the newest is still there"
    reader.check_integrity()


async def test_a_picture_in_ever_other_files_is_remembered_by_a_few(reader: MediaReader) -> None:
    """Each file has other metadata. The picture is charged once, so the memory of its files must have a bound."""
    files = [saved(noise(), pnginfo=comment(f"number {number}")) for number in range(5 * MAX_FILES)]
    pictures = {id((await read(reader, sent(file)))[0]) for file in files}
    assert (len(pictures), len(reader.cache)) == (1, 1)
    for file in reversed(files):
        await read(reader, sent(file))
    assert reader.counts.images["data", "cached"] == MAX_FILES, "the last ones"
    await forget(reader)


async def test_tiny_pictures_take_memory_for_their_books(decoders: Decoders) -> None:
    reader = MediaReader(replace(DEFAULTS, memory=10 * PICTURE_BYTES), decoders=decoders)
    for shade in range(20):
        await read(reader, sent(Image.new("RGB", (1, 1), (shade, 0, 0))))
        assert reader.memory.used <= reader.memory.total
    assert 0 < len(reader.cache) <= 10
    await forget(reader)


async def test_pictures_in_use_are_waited_for(decoders: Decoders) -> None:
    size = (100, 100)
    reader = MediaReader(replace(DEFAULTS, memory=100 * 100 * BYTES_PER_PIXEL + 100_000), decoders=decoders)
    held = await read(reader, *[sent(noise("L", size, seed)) for seed in range(3)])
    waiting = asyncio.create_task(read(reader, sent(noise("L", size, 9))))
    while not reader.memory.waiting:
        await asyncio.sleep(0)
    assert not len(reader.cache), "only requests hold pictures now"
    other = await read(reader, sent(noise("L", size, 10)), lane="other")
    assert len(other) == 1, "another tenant does not wait"
    assert not len(reader.cache), "while somebody waits, nothing is kept for later"
    assert not waiting.done()
    held.clear()
    gc.collect()
    assert len(await waiting) == 1
    del other
    await forget(reader)


async def test_a_request_whose_images_can_never_fit_does_not_wait(decoders: Decoders) -> None:
    """All its pictures are held until it ends."""
    files = [saved(noise("L", (100, 100), seed)) for seed in range(4)]
    kept = 100 * 100 * 3 + PICTURE_BYTES
    decoding = 2 * max(len(data_url(file)) for file in files) + 100 * 100 * BYTES_PER_PIXEL + PICTURE_BYTES
    reader = MediaReader(replace(DEFAULTS, memory=decoding + 2 * kept), decoders=decoders)
    async with asyncio.timeout(10):
        with pytest.raises(RequestError, match=rf"expected at most {reader.memory.total:,} \(--media-memory\)") as raised:
            await read(reader, *[sent(file, field=f"messages[{number}]") for number, file in enumerate(files)])
        error = raised.value
        assert (error.status, error.code, error.limit, error.param) == (400, "image_too_large", "media_memory", "messages[3]")
        assert reader.memory.used == 0, "it is refused before any is decoded"
        assert len(await read(reader, *map(sent, files[:3] * 2))) == 6, "equal ones count once"
        alone = MediaReader(replace(DEFAULTS, memory=decoding // 2), decoders=decoders)
        assert len(await read(alone, sent(files[0]))) == 1, "one picture never waits for room"


async def test_what_takes_most_memory_to_decode_is_decoded_first(decoders: Decoders) -> None:
    """After the small picture there would never be room for the large one."""
    small, large = sent(noise("L", (10, 10))), sent(noise("L", (200, 200)))
    reader = MediaReader(replace(DEFAULTS, memory=200 * 200 * BYTES_PER_PIXEL), decoders=decoders)
    async with asyncio.timeout(10):
        pictures = await read(reader, small, large, small)
    assert [len(picture.pixels) for picture in pictures] == [300, 120_000, 300]


async def test_a_file_that_is_hashed_in_a_thread_keeps_its_place(decoders: Decoders) -> None:
    """The other one has as many pixels, but a short file: it would be decoded first, and leave no room."""
    short, long = saved(Image.new("RGB", (200, 200))), saved(noise(size=(200, 200)))
    assert len(short) < MAX_HASHED_AT_ONCE < len(long)
    decoding = 2 * len(data_url(long)) + 200 * 200 * BYTES_PER_PIXEL + PICTURE_BYTES
    for files in ([short, long], [long, short]):
        reader = MediaReader(replace(DEFAULTS, memory=decoding), decoders=decoders)
        async with asyncio.timeout(10):
            assert len(await read(reader, *map(sent, files))) == 2
        await forget(reader)


async def test_a_cached_picture_leaves_its_room_to_a_larger_one_before_it(decoders: Decoders) -> None:
    """It is decoded again after that one."""
    small, large = sent(noise("L", (10, 10))), sent(noise("L", (200, 200)))
    reader = MediaReader(replace(DEFAULTS, memory=200 * 200 * BYTES_PER_PIXEL), decoders=decoders)
    async with asyncio.timeout(10):
        await read(reader, small)
        await asyncio.sleep(0)
        assert len(await read(reader, small, large)) == 2
    assert reader.counts.images == {("data", "decoded"): 3}
    async with asyncio.timeout(10):
        assert len(await read(reader, small, large)) == 2
    assert reader.counts.images["data", "cached"] == 2, "now both are there"
    await forget(reader)


async def test_a_picture_takes_its_memory_after_those_before_it(decoders: Decoders) -> None:
    """Another request leaves no room for the large one yet. There is room for the small one, but then the large one would never fit."""
    small, large = sent(noise("L", (10, 10))), sent(noise("L", (200, 200)))
    reader = MediaReader(replace(DEFAULTS, memory=200 * 200 * BYTES_PER_PIXEL), decoders=decoders)
    other = Share("another tenant")
    assert reader.memory.take(other, reader.memory.total // 2)
    mine = Share()
    assert reader.memory.take(mine, 1), "a tenant of whom nothing is under way need not wait"
    reading = asyncio.create_task(read(reader, small, large))
    while not reader.memory.waiting:
        await asyncio.sleep(0)
    assert reader.memory.used == reader.memory.total // 2 + 1
    reader.memory.release(mine)
    reader.memory.release(other)
    async with asyncio.timeout(10):
        assert len(await reading) == 2


async def test_files_that_are_fetched_do_not_wait_for_each_other(decoders: Decoders) -> None:
    """Together they are more than the memory, and none can be decoded before it is here."""
    files = [saved(noise("L", (10, 10), seed), pnginfo=comment(12_000 * "x")) for seed in range(10)]
    reader = MediaReader(replace(DEFAULTS, memory=110_000, max_bytes=20_000), fetcher=SlowWeb(files), decoders=decoders)
    assert sum(map(len, files)) > reader.memory.total
    await all_are_read(reader, 10, sent(noise("L", (20, 20))))


async def test_files_that_are_fetched_leave_room_for_what_came_with_the_request(decoders: Decoders) -> None:
    files = [saved(noise("L", (10, 10), seed), pnginfo=comment(16_500 * "x")) for seed in range(30)]
    reader = MediaReader(replace(DEFAULTS, memory=1_000_000, max_bytes=20_000), fetcher=SlowWeb(files), decoders=decoders)
    here = [sent(Image.new("RGB", (180, 180), (number, 0, 0))) for number in range(6)]
    await all_are_read(reader, 30, *here)


class SlowWeb:
    """The files come in many pieces."""

    def __init__(self, files: Sequence[bytes]) -> None:
        self.turns = FairBudget(100)
        self._files = files

    async def fetch(self, url: str, lane: str, weight: float, take: Callable[[int], Awaitable[None]]) -> bytes:
        file = self._files[int(url.removeprefix("https://"))]
        for place in range(0, len(file), 1000):
            await take(len(file[place : place + 1000]))
            await asyncio.sleep(0)
        return file


async def all_are_read(reader: MediaReader, urls: int, *here: ImageRef) -> None:
    remote = [ImageRef(FIELD, url=f"https://{number}") for number in range(urls)]
    async with asyncio.timeout(10):
        assert len(await read(reader, *remote, *here)) == urls + len(here)
    assert reader.memory.used == reader.held_bytes
    reader.check_integrity()


async def test_the_file_of_a_picture_is_let_go_when_it_is_decoded(decoders: Decoders) -> None:
    """Not when the request has all its pictures: another host may take long."""
    go_on = asyncio.Event()
    files = {"https://a": saved(noise(seed=1)), "https://b": saved(noise(seed=2))}

    class Web:
        turns = FairBudget(2)

        async def fetch(self, url: str, lane: str, weight: float, take: Callable[[int], Awaitable[None]]) -> bytes:
            if url == "https://b":
                await go_on.wait()
            await take(len(files[url]))
            return files[url]

    reader = MediaReader(fetcher=Web(), decoders=decoders)
    reading = asyncio.create_task(read(reader, *[ImageRef(FIELD, url) for url in ("https://a", "https://b", "https://a")]))
    while reader.counts.images.total() < 2:
        await asyncio.sleep(0)
    assert reader.memory.used == reader.held_bytes == 24 * 16 * 3 + PICTURE_BYTES
    go_on.set()
    assert len(await reading) == 3
    reader.check_integrity()


async def test_a_process_that_somebody_killed_is_replaced(reader: MediaReader) -> None:
    await read(reader, sent(noise(seed=50)))
    for process in reader.decoders.pids:
        os.kill(process, 9)
    assert len(await read(reader, sent(noise(seed=51)))) == 1
    assert not reader.decoders.lost


async def test_processes_that_somebody_killed_while_idle_are_replaced() -> None:
    reader = MediaReader(decoders=Decoders(3, DEFAULTS.max_bytes, DEFAULTS.max_pixels))
    try:
        while len(reader.decoders.pids) < 3:
            await read(reader, *[sent(noise(seed=draw)) for draw in random.sample(range(1000), 3)])
        for pid in reader.decoders.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222
        assert len(await read(reader, sent(noise(seed=1001)))) == 1
        assert not reader.decoders.lost
        assert len(reader.decoders.pids) == 1
    finally:
        reader.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_process_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = MediaReader(decoders=Decoders(1, DEFAULTS.max_bytes, DEFAULTS.max_pixels))
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    error = await refused(reader, sent(noise()))
    assert (error.status, "no process can be started" in error.message) == (503, True)
    before = descriptors()
    await refused(reader, sent(noise()))
    assert descriptors() == before
    reader.close()


@pytest.mark.parametrize("length", [10, -1, 10**12, 10**30])
async def test_a_process_that_lies_of_its_pixels_is_not_believed(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    done = msgspec.json.encode(Done((24, 16), b"content", b"seal", 0)).decode().replace(":0}", f":{length}}}")
    script.write_text(f"#!/bin/sh\nread job\necho '{done}'\nexec cat\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    reader = MediaReader(decoders=Decoders(1, DEFAULTS.max_bytes, DEFAULTS.max_pixels))
    try:
        error = await refused(reader, sent(noise()))
        assert (error.status, "the process that decodes it failed" in error.message) == (503, True)
        assert reader.decoders.pids == []
    finally:
        reader.close()


async def test_modules_in_the_directory_of_the_server_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "struct.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(penstock.__file__).parents[1]))
    reader = MediaReader(decoders=Decoders(1, DEFAULTS.max_bytes, DEFAULTS.max_pixels))
    try:
        assert len(await read(reader, sent(noise()))) == 1
    finally:
        reader.close()


async def test_a_picture_that_takes_too_long_is_refused() -> None:
    decoders = Decoders(1, DEFAULTS.max_bytes, DEFAULTS.max_pixels, cpu_seconds=0.02)
    reader = MediaReader(decoders=decoders)
    try:
        error = await refused(reader, sent(Image.new("RGB", (4000, 4000))))
        assert (error.status, error.param) == (400, FIELD)
        assert "decoding it takes more than 0.02 seconds" in error.message
        assert decoders.lost == {"slow": 1}
        assert len(await read(reader, sent(noise()))) == 1, "the next picture gets another process"
    finally:
        reader.close()


async def test_a_picture_that_takes_too_much_memory_is_refused() -> None:
    """The limit of the process holds, whatever a file makes a decoder do."""
    decoders = Decoders(1, 0, 0, base_bytes=96 * 2**20)
    reader = MediaReader(decoders=decoders)
    try:
        error = await refused(reader, sent(Image.new("RGB", (5000, 5000))))
        assert error.status == 400
        assert "memory" in error.message or "crashed" in error.message
        assert len(await read(reader, sent(noise()))) == 1
    finally:
        reader.close()


async def test_random_files_never_get_past_the_checks(reader: MediaReader) -> None:
    """Each mutation of a good file is a picture or a clear 400; and all memory comes back."""
    draw = random.Random(7)
    outcomes = set()
    for number in range(120):
        kind = ("PNG", "JPEG", "WEBP", "GIF")[number % 4]
        file = bytearray(saved(noise("P" if kind == "GIF" else "RGB", (40, 30), number), kind))
        for _ in range(draw.choice([1, 3, 20])):
            file[draw.randrange(len(file))] = draw.randrange(256)
        del file[draw.choice([len(file), draw.randrange(len(file))]) :]
        try:
            await read(reader, sent(bytes(file)))
            outcomes.add("read")
        except RequestError as error:
            assert (error.status, error.param) == (400, FIELD), error.message
            outcomes.add(error.code)
    assert outcomes >= {"read", "invalid_image"}
    await forget(reader)
    assert reader.memory.used == 0
    assert reader.decoders.lost.keys() <= {"slow"}


@pytest.mark.parametrize(
    ("number", "status", "lost"), [(signal.SIGSEGV, 400, {"crashed": 1}), (signal.SIGABRT, 400, {"crashed": 1}), (signal.SIGKILL, 200, {})]
)
async def test_a_process_that_dies_of_a_picture_harms_nobody_else(number: signal.Signals, status: int, lost: dict[str, int]) -> None:
    """It is stopped before it gets the picture, and then dies. If somebody else killed it, the picture is not to blame."""
    reader = MediaReader(decoders=Decoders(1, DEFAULTS.max_bytes, DEFAULTS.max_pixels))
    try:
        reading, pid = await begin_stopped(reader)
        os.kill(pid, number)
        os.kill(pid, signal.SIGCONT)
        if status == 200:
            assert len(await reading) == 1
        else:
            with pytest.raises(RequestError, match="the decoder of PNG crashed on it") as raised:
                await reading
            assert (raised.value.status, raised.value.param) == (status, FIELD)
        assert reader.decoders.lost == lost
        assert len(await read(reader, sent(noise(seed=3)))) == 1
        assert reader.decoders.pids != [pid]
    finally:
        reader.close()


async def test_a_process_that_does_not_answer_is_given_up() -> None:
    reader = MediaReader(decoders=Decoders(1, DEFAULTS.max_bytes, DEFAULTS.max_pixels, stuck_seconds=2.0))
    try:
        reading, _ = await begin_stopped(reader)
        with pytest.raises(RequestError, match="not decoded within 2 seconds") as raised:
            await reading
        assert raised.value.status == 503, "the picture is not to blame"
        assert reader.decoders.lost == {"overloaded": 1}
        assert reader.counts.images["data", "failed"] == 1
    finally:
        reader.close()


async def test_nothing_is_left_when_the_server_ends_meanwhile() -> None:
    reader = MediaReader(decoders=Decoders(1, DEFAULTS.max_bytes, DEFAULTS.max_pixels))
    reading, _ = await begin_stopped(reader)
    reader.close()
    with pytest.raises(RequestError) as raised:
        await reading
    assert raised.value.status == 503
    assert reader.decoders.pids == []
    reader.check_integrity()


async def begin_stopped(reader: MediaReader) -> tuple[asyncio.Task[list[Picture]], int]:
    """A picture is with a process that is stopped."""
    await read(reader, sent(noise(seed=1)))
    (pid,) = reader.decoders.pids
    os.kill(pid, signal.SIGSTOP)
    # On a busy machine, it may go on for a while.
    os.waitid(os.P_PID, pid, os.WSTOPPED)  # noqa: ASYNC222
    reading = asyncio.create_task(read(reader, sent(noise(seed=2))))
    while not waits_at(pid):
        await asyncio.sleep(0.001)
    return reading, pid


def waits_at(pid: int) -> bool:
    """Whether there is anything in the pipe to this process."""
    with Path(f"/proc/{pid}/fd/0").open("rb", buffering=0) as pipe:
        return any(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))


def test_a_server_without_pillow_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    shared = os.memfd_create("test")
    found = answer(Job(9, False, "PNG", 384, False, RULES, 1.0), shared)
    os.close(shared)
    assert found == Refused("missing", "the server lacks the package 'PIL': pip install 'penstock[model]'")
