"""Measures copies of KV between a GPU and host memory: bytes, rates, a prefix that is loaded, and what decoding notices of it.

    python bench/gpu/kv.py [--json FILE] [--markdown FILE] [--seconds 240]

An 8B-shaped model with random weights needs no download and about 60 GB of GPU memory. The most important figures come first; after
`--seconds` the script ends with what it has. With `--device cpu` everything is tiny, to try the script itself.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import itertools
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

# The folder of this script: there `kv` would be the script itself.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from gpu.engine import GREEDY, TINY, make_engine, random_weights, requests, run
from gpu.long_prompt import GB, Bench, finish, first_token, load, say
from kv.engines import Worker, disaggregated, started, tokens_of
from penstock.engine.attention import KVStore
from penstock.engine.engine import Engine
from penstock.engine.host_slots import HostSlots
from penstock.engine.model import Model
from penstock.engine.page_copies import PageCopies
from penstock.engine.page_memory import checksum
from penstock.engine.shape import ModelShape
from penstock.wire.messages import Fetch, KvSource, Submit

PAGE = 16
FOR_EVER = 1e6
# A part that hangs says where, and the lent machine is not lent for nothing.
MAX_PART_SECONDS = 60


class Parts:
    """The parts of the bench, each with a limit."""

    def __init__(self, bench: Bench, only: list[str]) -> None:
        self._bench = bench
        self._only = only

    def run(self, name: str, seconds: float, measure: Callable[[], Any]) -> None:
        if self._only and not any(name.startswith(each) for each in self._only):
            return
        faulthandler.dump_traceback_later(MAX_PART_SECONDS, exit=True)
        self._bench.part(name, seconds, measure)
        faulthandler.cancel_dump_traceback_later()


def nothing() -> None:
    pass


def run_copies(copies: PageCopies) -> None:
    while copies.is_busy:
        copies.wait()
        copies.poll()


def fill(store: KVStore) -> None:
    store.strips.random_(-(2**62), 2**62)


# Bytes.


def bytes_of(store: KVStore, page: int) -> bytes:
    """A page by the definition of a slot, with a plain loop: the keys of all layers, then the values."""
    strips = [kind[layer, page] for kind in (store.keys, store.values) for layer in range(len(kind))]
    return b"".join(strip.cpu().contiguous().view(torch.uint8).numpy().tobytes() for strip in strips)


def check_bytes(bench: Bench) -> list[dict[str, Any]]:
    """Random pages to random slots and back to other pages: the right bytes everywhere, and no other page changes."""
    shapes = [bench.sizes.shape, TINY, ModelShape(64, 5, 8, 8, 24, 64, 64, 512)]
    found = []
    for shape, dtype in itertools.product(shapes, (torch.bfloat16, torch.float32)):
        numbers = random.Random(shape.layers)
        store = KVStore(shape, 200, PAGE, dtype, bench.device)
        fill(store)
        finish(bench.device)
        slots = HostSlots(store, 150)
        copies = PageCopies(store, slots)
        pages, places, targets = (numbers.sample(range(limit), 120) for limit in (200, 150, 200))
        before = store.strips.clone()
        copies.save(pages, places, nothing)
        run_copies(copies)
        saved = sum(bytes(slots.views(place)[0]) == bytes_of(store, page) for page, place in zip(pages, places, strict=True))
        copies.load(places, targets, nothing)
        run_copies(copies)
        before[:, targets] = before[:, pages]
        row = {"layers": shape.layers, "dtype": str(dtype), "saved": saved, "of": len(pages), "store": torch.equal(store.strips, before)}
        say(f"   {row}")
        assert saved == len(pages)
        assert row["store"]
        copies.close()
        found.append(row)
    return found


def check_order(bench: Bench) -> dict[str, Any]:
    """Pages are overwritten as soon as their save is queued, and saved as soon as a kernel that writes them is launched. The second figure
    is without `protect`: it shows that this check would notice."""
    store = KVStore(bench.sizes.shape, 1000, PAGE, bench.sizes.dtype, bench.device)
    copies = PageCopies(store, HostSlots(store, 500))
    wrong = {"protected": 0, "not protected": 0}
    for turn, (name, count) in itertools.product(range(8), (("protected", 400), ("not protected", 400))):
        pages = random.Random(turn).sample(range(1000), count)
        index = torch.tensor(pages, device=bench.device)
        finish(bench.device)
        busy(bench)
        store.strips.index_fill_(1, index, turn + 100)
        copies.save(pages, range(count), nothing)
        if name == "protected":
            copies.protect(pages)
        else:
            copies.start(FOR_EVER)
        store.strips.index_fill_(1, index, -1)
        run_copies(copies)
        wrong[name] += int((copies.slots.tensor[:count] != turn + 100).flatten(1).any(1).sum())
    copies.close()
    say(f"   pages with wrong bytes, of 3,200: {wrong}")
    assert not wrong["protected"]
    return {f"wrong pages, {name}": count for name, count in wrong.items()}


def busy(bench: Bench) -> None:
    """The device has something to do for some milliseconds."""
    matrix = torch.ones(4096 if bench.device.type == "cuda" else 64, 4096 if bench.device.type == "cuda" else 64, device=bench.device)
    for _ in range(10):
        matrix = (matrix @ matrix).clamp_(-1, 1)


# Rates.


def timed(bench: Bench, call: Callable[[], Any], turns: int = 5) -> float:
    times = []
    for _ in range(turns + 1):
        finish(bench.device)
        began = time.perf_counter()
        call()
        finish(bench.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure_rates(bench: Bench) -> list[dict[str, Any]]:
    """Whole copies, with gathering, against one plain copy of the same size to memory that torch has pinned."""
    is_gpu = bench.device.type == "cuda"
    most = 1000 if is_gpu else 20
    store = KVStore(bench.sizes.shape, 3 * most, PAGE, bench.sizes.dtype, bench.device)
    fill(store)
    began = time.perf_counter()
    slots = HostSlots(store, 2 * most)
    seconds = time.perf_counter() - began
    size = slots.layout.slot_bytes
    say(f"   {2 * most * size / GB:.1f} GB of slots: {seconds:.2f} s to make")
    copies = PageCopies(store, slots)
    pinned = torch.empty(most * size, dtype=torch.uint8, pin_memory=is_gpu)
    device = torch.empty_like(pinned, device=bench.device).random_()
    found: list[dict[str, Any]] = [{"slots_gb": 2 * most * size / GB, "seconds_to_make": seconds}]
    for count, is_scattered in ((most, False), (most, True), (most // 10, False), (most // 10, True), (1, False)):
        numbers = random.Random(count)
        pages = numbers.sample(range(3 * most), count)
        places = numbers.sample(range(2 * most), count) if is_scattered else list(range(count))
        row: dict[str, Any] = {"pages": count, "MB": count * size / 1e6, "slots": "scattered" if is_scattered else "neighbours"}
        ways: dict[str, Callable[[], Any]] = {
            "plain save": partial(pinned[: count * size].copy_, device[: count * size], non_blocking=True),
            "save": partial(save, copies, pages, places),
            "plain load": partial(device[: count * size].copy_, pinned[: count * size], non_blocking=True),
            "load": partial(load_pages, copies, pages, places),
        }
        for name, way in ways.items():
            row[f"{name}, GB/s"] = count * size / timed(bench, way) / GB
            copies.poll()
        for name in ("save", "load"):
            row[f"{name}, of plain"] = row[f"{name}, GB/s"] / row[f"plain {name}, GB/s"]
            began = time.perf_counter()
            ways[name]()
            row[f"{name}, host ms"] = (time.perf_counter() - began) * 1e3
            finish(bench.device)
            copies.poll()
        say(f"   {shown(row)}")
        found.append(row)
    copies.close()
    return found


def save(copies: PageCopies, pages: Sequence[int], slots: Sequence[int]) -> None:
    copies.save(pages, slots, nothing)
    copies.start(FOR_EVER)


def load_pages(copies: PageCopies, pages: Sequence[int], slots: Sequence[int]) -> None:
    copies.load(slots, pages, nothing)
    copies.start(FOR_EVER)


def shown(row: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}


# A prefix that is loaded.


def blocks(tokens: Sequence[int], count: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + PAGE]) for start in range(0, count * PAGE, PAGE)]


def save_prompt(engine: Engine, tokens: Sequence[int], slots: Sequence[int]) -> int:
    """Saves the cached blocks of a prompt. Returns how many there are."""
    path = engine._cache.match(b"", tokens)
    assert engine.copies is not None
    engine.copies.save([node.page for node in path], slots[: len(path)], nothing)
    run_copies(engine.copies)
    return len(path)


def load_prompt(engine: Engine, tokens: Sequence[int], slots: Sequence[int]) -> None:
    """Loads the blocks of a prompt into new pages and commits them when they are there, as an import does."""
    cache, copies = engine._cache, engine.copies
    assert copies is not None
    pages = cache.allocate(len(slots), time.monotonic())

    def commit() -> None:
        cache.release(cache.commit(cache.root(b""), blocks(tokens, len(slots)), pages, None))

    engine._wipe(cache.take_fresh())
    copies.load(slots, pages, commit)
    while copies.is_busy:
        engine.step()


def measure_prefix(bench: Bench, model: Model) -> dict[str, Any]:
    """The time to the first token of a long prompt: computed, and with its prefix in host memory. Each in a new engine, after a warm-up."""
    length = 16_016 if bench.device.type == "cuda" else 336
    count = (length - 1) // PAGE
    numbers = random.Random(8)
    row: dict[str, Any] = {"tokens": count * PAGE, "MB": 0.0}
    computed, loaded, whole, same = [], [], [], 0
    for _ in range(3):
        tokens = tuple(numbers.randrange(model.shape.vocab_size) for _ in range(length))
        engine = make_engine(model, 3 * count, token_budget=8192, host_slots=count)
        assert engine.copies is not None
        row["MB"] = count * engine.copies.slots.layout.slot_bytes / 1e6
        finish(bench.device)
        began = time.perf_counter()
        first_token(engine, Submit(b"a" * 16, tokens, 1, 0, sampling=GREEDY))
        computed.append(time.perf_counter() - began)
        # The last piece of the prompt alone rounds otherwise than a long one.
        token = first_token(engine, Submit(b"c" * 16, tokens, 1, 0, sampling=GREEDY))
        slots = list(range(count))
        assert save_prompt(engine, tokens, slots) == count
        # The same engine with nothing cached.
        assert engine._cache.cached >= count
        taken = engine._cache.allocate(3 * count, time.monotonic())
        engine._cache.give_back(taken)
        engine._wipe(engine._cache.take_fresh())
        finish(bench.device)
        began = time.perf_counter()
        load_prompt(engine, tokens, slots)
        loaded.append(time.perf_counter() - began)
        same += first_token(engine, Submit(b"b" * 16, tokens, 1, 0, sampling=GREEDY)) == token
        whole.append(time.perf_counter() - began)
        engine.check_integrity()
        engine.close()
    row |= {"computed, ms": min(computed) * 1e3, "loaded, ms": min(loaded) * 1e3, "loaded, to the first token, ms": min(whole) * 1e3}
    row["same token, of 3"] = same
    row |= {"computed / loaded": min(computed) / min(loaded), "computed / loaded, to the first token": min(computed) / min(whole)}
    say(f"   {shown(row)}")
    return row


# What decoding notices.


class Load:
    """Keeps copies of random pages queued. The pages to load are the pool's last ones, which no sequence has."""

    def __init__(self, engine: Engine, kind: str, is_scattered: bool) -> None:
        assert engine.copies is not None
        self._copies, self._kind = engine.copies, kind
        self._slots, self._pages = engine.copies.slots.layout.slots, engine._cache.pages
        self._is_scattered = is_scattered
        self._count = min(200, self._slots // 2)
        self._numbers = random.Random(4)
        self.pages = self._queued = 0

    def keep_up(self) -> None:
        while self._queued < 4:
            self._queued += 1
            count = self._count
            first = self._numbers.randrange(self._slots - count)
            slots = self._numbers.sample(range(self._slots), count) if self._is_scattered else list(range(first, first + count))
            pages = self._numbers.sample(range(self._pages - self._slots, self._pages), count)
            if self._kind == "save":
                self._copies.save(pages, slots, self._ended)
            else:
                self._copies.load(slots, pages, self._ended)

    def _ended(self) -> None:
        self._queued -= 1
        self.pages += self._count


def measure_decoding(bench: Bench, model: Model, batch: int, kinds: Sequence[tuple[str, bool]]) -> list[dict[str, Any]]:
    """Decode steps with copies and without, by turns: the host's own speed changes from second to second."""
    is_gpu = bench.device.type == "cuda"
    slots = 1500 if is_gpu else 30
    pages = batch * (400 + 2200) // PAGE + slots if is_gpu else 900
    engine = make_engine(model, pages, max_batch=batch, token_budget=8192, host_slots=slots)
    for submit in requests(model.shape, batch, 400 if is_gpu else 40, 2100 if is_gpu else 500):
        engine.submit(submit)
    generated = 0
    while generated < batch:
        generated += len(engine.step())
    assert engine.copies is not None
    found = []
    for kind, is_scattered in kinds:
        copying = Load(engine, kind, is_scattered)
        pages_copied = 0
        times: dict[bool, list[float]] = {True: [], False: []}
        seconds = 0.0
        for is_copying in (False, True) * (9 if is_gpu else 2):
            steps(engine, 3, copying if is_copying else None)
            before, began = copying.pages, time.perf_counter()
            times[is_copying] += steps(engine, 12, copying if is_copying else None)
            if is_copying:
                seconds += time.perf_counter() - began
                pages_copied += copying.pages - before
        # The mean, since not every step has copies, without the slowest steps: the host is disturbed now and then.
        off, on = (statistics.mean(sorted(times[key])[: -len(times[key]) // 20]) * 1e3 for key in (False, True))
        row: dict[str, Any] = {"batch": batch, "copies": kind, "slots": "scattered" if is_scattered else "neighbours"}
        row |= {"step, ms": off, "with copies, ms": on, "slower": slower(times[False], times[True])}
        row |= {"p90, ms": nth(times[False], 0.9), "p90 with copies, ms": nth(times[True], 0.9)}
        row["GB/s"] = pages_copied * engine.copies.slots.layout.slot_bytes / seconds / GB
        say(f"   {shown(row)}")
        found.append(row)
    engine.close()
    return found


def slower(off: list[float], on: list[float], turn: int = 12) -> float:
    """The median of all turns: each against the one before it, without copies. The speed of the host changes from second to second."""
    starts = range(0, len(off), turn)
    return statistics.median([sum(on[at : at + turn]) / sum(off[at : at + turn]) for at in starts]) - 1


def nth(times: list[float], part: float) -> float:
    return sorted(times)[int(len(times) * part)] * 1e3


def steps(engine: Engine, count: int, copying: Load | None) -> list[float]:
    """The time of each step. What the bench itself does to queue copies is not counted; all that the engine does is."""
    assert engine.copies is not None
    times: list[float] = []
    if copying is None:
        run_copies(engine.copies)
    for _ in range(count):
        if copying is not None:
            copying.keep_up()
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    return times


# Tokens.


def check_tokens(bench: Bench, model: Model | None) -> dict[str, Any]:
    """Prompts are computed by one engine and continued by another one, which gets their KV from host memory: the same tokens and bytes as
    when the first one continues them.

    The tiny float32 model also gives the tokens of an engine that computes and continues: in bfloat16, pieces of other lengths round
    otherwise."""
    if model is None:
        weights = list(random_weights(TINY, torch.float32, torch.device("cpu"), 0.15))
        model = Model(TINY, weights, TINY.trained_length, torch.float32, bench.device)
    submits = requests(model.shape, 12, 700, 32)
    first, second, third = (make_engine(model, 12 * 50, host_slots=12 * 44) for _ in range(3))
    computed = run(third, submits)
    third.close()
    run(first, [structs.replace(submit, max_tokens=1) for submit in submits])
    assert first.copies is not None
    assert second.copies is not None
    same_bytes = 0
    for index, submit in enumerate(submits):
        slots = range(index * 44, (index + 1) * 44)
        count = save_prompt(first, submit.token_ids, slots)
        # What a transport does: bytes from one memory to the other, checked.
        for slot in slots[:count]:
            views = first.copies.slots.views(slot)
            second.copies.slots.views(slot)[0][:] = views[0]
            assert checksum(second.copies.slots.views(slot)) == checksum(views)
        load_prompt(second, submit.token_ids, slots[:count])
        same_bytes += kv_bytes_equal(first, second, submit.token_ids)
    cached, found = run(first, submits), run(second, submits)
    row = {
        "dtype": str(model.dtype),
        "sequences": len(submits),
        "tokens equal": sum(found[submit.id] == cached[submit.id] for submit in submits),
        "KV bytes equal": same_bytes,
        "tokens equal to computed ones": sum(found[submit.id] == computed[submit.id] for submit in submits),
        "tokens reused": second.stats().prompt_tokens_cached,
    }
    first.close()
    second.close()
    say(f"   {row}")
    assert same_bytes == len(submits)
    assert found == cached
    return row


def kv_bytes_equal(first: Engine, second: Engine, tokens: Sequence[int]) -> bool:
    """Whether both have the same KV of this prompt on the device."""
    strips = []
    for engine in (first, second):
        pages = [node.page for node in engine._cache.match(b"", tokens)]
        strips.append(engine._store.strips[:, pages])
    return torch.equal(*strips)


# Another worker.


def measure_transfer(bench: Bench, model: Model, kind: str) -> dict[str, Any]:
    """A long prompt is computed by one worker and continued by another one, over the real transport. The tokens are those of the first
    worker when it continues itself. Then a third worker pulls all blocks at once."""
    length, budget = (16_016, 8192) if bench.device.type == "cuda" else (336, 128)
    blocks = length // PAGE

    def make() -> Engine:
        return make_engine(model, 2 * blocks, token_budget=budget, staging_slots=blocks)

    tokens = tuple(random.Random(5).choices(range(model.shape.vocab_size), k=length))
    row = asyncio.run(transfer(kind, make, Submit(b"r" * 16, tokens, 32, 0, sampling=GREEDY)))
    say(f"   {shown(row)}")
    assert row["tokens equal"] == 32
    assert row["blocks"] == blocks
    return row


async def transfer(kind: str, make: Callable[[], Engine], request: Submit) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        first, second, third = workers = await started(kind, directory, [make] * 3)
        made = tokens_of(await disaggregated(first, second, request, b"t" * 16))
        rest = structs.replace(request, id=b"s" * 16, token_ids=(*request.token_ids, made[0]), offset=1)
        own = tokens_of(await first.answer(rest))
        await second.until(lambda: bool(second.reports))
        moved = second.reports[0]
        row: dict[str, Any] = {"over": kind, "blocks": moved.blocks, "MB": moved.size / 1e6, "beside computing, s": moved.seconds}
        row["tokens equal"] = sum(a == b for a, b in zip(made, [made[0], *own], strict=True))
        row["pulled at once, GB/s"] = await pull_rate(third, first, request)
        for worker in workers:
            await worker.close()
    return row


async def pull_rate(target: Worker, source: Worker, request: Submit) -> float:
    target.backend.fetch(Fetch(KvSource(b"u" * 16, source.address), request.token_ids, 10.0))
    await target.until(lambda: bool(target.reports))
    (report,) = target.reports
    assert report.outcome == "done", report
    return report.size / report.seconds / GB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the same as tables")
    parser.add_argument("--seconds", type=float, default=240, help="end after this time with what is known")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="only parts whose names begin so")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    bench = Bench(device, arguments)
    parts = Parts(bench, arguments.only)
    say(f"{bench.report['device']}, torch {torch.__version__}")
    if device.type == "cpu":
        bench.sizes.shape = replace(bench.sizes.shape, layers=2)
    parts.run("bytes", 10, lambda: check_bytes(bench))
    parts.run("order of streams", 10, lambda: check_order(bench))
    parts.run("rates", 15, lambda: measure_rates(bench))
    parts.run("tokens, float32", 10, lambda: check_tokens(bench, None))
    model, _ = load(bench, bench.sizes.shape)
    parts.run("tokens", 15, lambda: check_tokens(bench, model))
    parts.run("a prefix of 16,000 tokens", 20, lambda: measure_prefix(bench, model))
    for kind in ("shared memory", "TCP"):
        parts.run(f"from another worker, {kind}", 20, partial(measure_transfer, bench, model, kind))
    kinds = [("save", False), ("save", True), ("load", False)]
    for batch in (8, 64, 256) if device.type == "cuda" else (4,):
        parts.run(f"decoding, batch {batch}", 20, partial(measure_decoding, bench, model, batch, kinds))
    say("-- done")


if __name__ == "__main__":
    main()
