"""One engine for all tests of it: engines take long to start, so it lives on an event loop that is kept between the tests."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import uvloop

from chat_model import chat_model, random_prompt
from contract.backends.judges import Judge, ModelJudge, SimulatorJudge
from contract.backends.setups import Setup
from penstock.cli.engines import make_backend
from penstock.cli.main import load
from penstock.config.commands import WorkerSettings
from penstock.router.index import KvFeed, PrefixIndex
from penstock.stream.slot import Slot
from penstock.wire.errors import StreamError
from penstock.wire.messages import (
    Delta,
    Fault,
    Fetch,
    Finish,
    ImagesWanted,
    KvEvents,
    KvSource,
    ModelInfo,
    PromptReport,
    Sampling,
    Segment,
    SessionReport,
    SessionState,
    SessionTurn,
    Snapshot,
    Submit,
    Terminal,
    TokenLogprob,
    TransferReport,
    WorkerStats,
)
from penstock.worker.backend import Backend, Emit, WantImages, wants_none
from penstock.worker.runtime import WorkerRuntime
from replayed_events import apply_events

Answer = TypeVar("Answer")

GREEDY = Sampling(temperature=0)
WORKER = "the worker"


class Generation:
    """What has come of one generation, exactly as the engine gave it.

    The slot is what the runtime keeps for it, and raises for every gap, overlap and second terminal.
    """

    def __init__(self, request: Submit) -> None:
        self.request = request
        self.deltas: list[Delta] = []
        self.terminal: Terminal | None = None
        self._slot = Slot(request.offset)

    def take(self, segment: Segment) -> None:
        if segment.delta is not None:
            self._slot.put(segment.delta)
            assert (segment.delta.prompt is not None) == (not self.deltas), "what is known of the prompt comes once, with the first delta"
            self.deltas.append(segment.delta)
        if segment.terminal is not None:
            self._slot.end(segment.terminal)
            self.terminal = segment.terminal

    @property
    def made(self) -> int:
        """How many tokens have come."""
        return self._slot.next_offset - self.request.offset

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas for token in delta.token_ids)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """Fails unless every delta has one for each of its tokens."""
        for delta in self.deltas:
            assert len(delta.logprobs or ()) == len(delta.token_ids)
        return tuple(logprob for delta in self.deltas for logprob in delta.logprobs or ())

    @property
    def report(self) -> PromptReport:
        assert self.deltas, self.terminal
        report = self.deltas[0].prompt
        assert report is not None
        return report

    @property
    def cached_tokens(self) -> int:
        return self.report.cached_tokens

    @property
    def session(self) -> SessionState | None:
        return self.report.session

    @property
    def fault(self) -> Fault:
        assert isinstance(self.terminal, Fault), self.terminal
        assert not self.deltas, "a generation that never ran made tokens"
        return self.terminal

    def check(self, reason: str = "length", count: int | None = None) -> None:
        """It ended for this reason, after so many tokens: all that were allowed, if nothing else is said."""
        assert self.terminal == Finish(reason), self.terminal  # type: ignore[arg-type]
        assert len(self.tokens) == (self.request.max_tokens - self.request.offset if count is None else count)


class Replay:
    """What the engine's KV events add up to: strictly, and in the router's index as the router puts it there."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()
        self.roots = {b""}
        self.index = PrefixIndex()
        self.index.join(WORKER, 0.0)
        self._feed = KvFeed(self.index, WORKER)
        self._next_number: int | None = None

    def begin(self, snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            apply_events(self.blocks, snapshot.events, self.roots)
            self._feed.load(snapshot)
            self._next_number = snapshot.next_number

    def take(self, batch: KvEvents) -> None:
        assert self._next_number is not None, "events of an engine that says it tells none"
        assert batch.first == self._next_number, "events are numbered without a gap"
        self._next_number += len(batch.events)
        apply_events(self.blocks, batch.events, self.roots)
        assert not self._feed.receive(batch)

    def overlap(self, names: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, the router believes the worker to have."""
        return self.index.overlaps(names, 0.0).get(WORKER, 0)

    def check(self, snapshot: Snapshot) -> None:
        """A snapshot says what the events before it add up to."""
        assert snapshot.next_number == self._next_number
        blocks: set[bytes] = set()
        apply_events(blocks, snapshot.events, self.roots)
        assert blocks == self.blocks
        assert self.index.held(WORKER)[0] == len(blocks)
        self.index.check_integrity()


class Tap:
    """The backend as the runtime sees it. What the rig began goes to the rig; the rest to the runtime, as does every step."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.generations: dict[bytes, Generation] = {}
        self.of_the_runtime: set[bytes] = set()
        self.replay = Replay()
        self.broken: list[Exception] = []
        self.pictures: dict[bytes, tuple[tuple[int, int], bytes]] = {}
        """The size and pixels of images, by name: what generations of the rig are answered with."""
        self.asked: list[ImagesWanted] = []
        self.answers_images = True

    @property
    def model(self) -> ModelInfo:
        return self.backend.model

    async def start(self, emit: Emit, want: WantImages = wants_none) -> None:
        def tapped(segments: Sequence[Segment], events: KvEvents | None, transfers: Sequence[TransferReport] = ()) -> None:
            try:
                self._note(segments, events)
            except (AssertionError, StreamError) as error:
                # It is the engine's own task that calls: the test is told when it looks.
                self.broken.append(error)
            emit([segment for segment in segments if segment.id not in self.generations], events, transfers)

        def tapped_want(wanted: ImagesWanted) -> None:
            if wanted.generation in self.generations:
                self.asked.append(wanted)
                if self.answers_images:
                    asyncio.get_running_loop().call_soon(self.answer, wanted)
            else:
                want(wanted)

        await self.backend.start(tapped, tapped_want)
        self.replay.begin(await self.backend.snapshot())

    def answer(self, wanted: ImagesWanted) -> None:
        for name in wanted.names:
            self.backend.image(name, *self.pictures[name])

    def _note(self, segments: Sequence[Segment], events: KvEvents | None) -> None:
        if events is not None:
            self.replay.take(events)
        for segment in segments:
            if segment.id in self.generations:
                self.generations[segment.id].take(segment)
            else:
                assert segment.id in self.of_the_runtime, f"{segment} of a generation that nobody began, or that ended long ago"

    def forget(self) -> None:
        """All has ended: nothing may come of it any more."""
        self.generations.clear()
        self.of_the_runtime.clear()

    def submit(self, request: Submit) -> None:
        self.of_the_runtime.add(request.id)
        self.backend.submit(request)

    def cancel(self, generation: bytes) -> None:
        self.backend.cancel(generation)

    def fetch(self, request: Fetch) -> None:
        self.backend.fetch(request)

    def end_transfer(self, transfer: bytes) -> None:
        self.backend.end_transfer(transfer)

    def image(self, name: bytes, size: tuple[int, int], pixels: bytes) -> None:
        self.backend.image(name, size, pixels)

    def image_at(self, name: bytes, source: KvSource) -> None:
        self.backend.image_at(name, source)

    def image_refused(self, name: bytes, reason: str, *, retryable: bool) -> None:
        self.backend.image_refused(name, reason, retryable=retryable)

    def close_session(self, session_id: str, epoch: int, *, frees: bool = True) -> None:
        self.backend.close_session(session_id, epoch)

    async def describe_sessions(self, session_ids: Sequence[str], *, with_tokens: bool = False) -> Sequence[SessionReport]:
        return await self.backend.describe_sessions(session_ids, with_tokens=with_tokens)

    async def snapshot(self) -> Snapshot | None:
        return await self.backend.snapshot()

    def stats(self) -> WorkerStats:
        return self.backend.stats()

    async def close(self) -> None:
        await self.backend.close()


class Rig:
    """An engine as the command line starts it, behind the worker's own runtime, and what a test wants of it.

    Every test leaves it as it found it: `check_settled`.
    """

    def __init__(self, setup: Setup, *flags: str, model: Path | None = None) -> None:
        """The model of these tests, or another with the same vocabulary."""
        setup.prepare()
        self.setup = setup
        self.directory = model or chat_model()
        self.judge: Judge = SimulatorJudge(self.directory) if setup.engine == "simulator" else ModelJudge(self.directory)
        self.failures = 0
        self._folder = tempfile.TemporaryDirectory(prefix="contract-")
        self._begun = 0
        self._tasks = 0
        self.backend, _ = make_backend(self._settings(flags), self._on_failure)
        self.tap = Tap(self.backend)
        self.runtime = WorkerRuntime(self.tap)
        self._loop = uvloop.new_event_loop()

    def __enter__(self) -> Self:
        try:
            self.run(self._start(), self.setup.start_seconds)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self.runtime.close())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._folder.cleanup()

    def run(self, work: Coroutine[Any, Any, Answer], seconds: float | None = None) -> Answer:
        """The event loop runs for as long as this takes, and no longer."""
        return self._loop.run_until_complete(asyncio.wait_for(work, seconds or self.setup.patience))

    @property
    def model(self) -> ModelInfo:
        return self.backend.model

    @property
    def folder(self) -> Path:
        """For sockets."""
        return Path(self._folder.name)

    @property
    def has_died(self) -> bool:
        return self.failures > 0

    def lacks(self, what: str) -> str | None:
        """Why the engine cannot have this; None when it has it."""
        return self.setup.lacks.get(what)

    @property
    def chooser(self) -> ModelJudge:
        """The judge of an engine whose choice a request can change."""
        assert isinstance(self.judge, ModelJudge)
        return self.judge

    def prompt(self, name: str, length: int) -> tuple[int, ...]:
        """Random tokens; the same for the same name."""
        return random_prompt(name, length)

    def text(self, tokens: Sequence[int]) -> str:
        """Without special tokens."""
        from tokenizers import Tokenizer

        decoded: str = Tokenizer.from_file(str(self.directory / "tokenizer.json")).decode(list(tokens))
        return decoded

    def request(self, prompt: Sequence[int], max_tokens: int = 16, **fields: Any) -> Submit:
        """Greedy, and up to the last token that is allowed, unless told otherwise."""
        self._begun += 1
        given = {"seed": self._begun, "sampling": GREEDY, "ignore_eos": True, **fields}
        request = Submit(self._begun.to_bytes(16, "big"), tuple(prompt), max_tokens, **given)
        self.tap.replay.roots.add(request.root)
        return request

    def begin(self, request: Submit) -> Generation:
        generation = self.tap.generations[request.id] = Generation(request)
        self.backend.submit(request)
        return generation

    async def ended(self, *generations: Generation) -> None:
        await self.until(lambda: all(generation.terminal is not None for generation in generations))

    async def has_made(self, generation: Generation, count: int) -> None:
        await self.until(lambda: generation.made >= count or generation.terminal is not None)

    async def finish(self, requests: Iterable[Submit]) -> list[Generation]:
        """All at once, until the last has ended."""
        generations = [self.begin(request) for request in requests]
        await self.ended(*generations)
        return generations

    def ask(self, request: Submit) -> Generation:
        """One, alone, from its beginning to its end."""
        return self.run(self.finish([request]))[0]

    def say(self, prompt: Sequence[int], max_tokens: int = 16, **fields: Any) -> Generation:
        return self.ask(self.request(prompt, max_tokens, **fields))

    def turn(self, session: SessionTurn, prompt: Sequence[int], max_tokens: int = 4, **fields: Any) -> Generation:
        return self.say(prompt, max_tokens, session=session, **fields)

    def check_exact(self, *generations: Generation) -> None:
        """They are what the request determines, token by token."""
        for generation in generations:
            assert list(generation.tokens) == self.judge.expected(generation.request, generation.tokens)

    async def cancel(self, generation: Generation) -> None:
        """And waits until the engine has heard of it: what it had made until then has come, and nothing may come from now on."""
        self.backend.cancel(generation.request.id)
        await self.backend.describe_sessions(())

    def describe(self, *session_ids: str) -> list[SessionReport]:
        return list(self.run(_as_coroutine(self.backend.describe_sessions(session_ids))))

    def close_session(self, session_id: str, epoch: int, *, frees: bool = True) -> None:
        async def close() -> None:
            self.backend.close_session(session_id, epoch)

        self.run(close())

    async def until(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Fails when it does not come true."""
        async with asyncio.timeout(seconds or self.setup.patience):
            while not condition():
                await self.breathe()
        self.check_unbroken()

    async def breathe(self) -> None:
        """Lets the engine go on for a moment; fails if it has broken its stream."""
        self.check_unbroken()
        await asyncio.sleep(0.001)

    def check_unbroken(self) -> None:
        """Nothing has come out of sequence, for any generation or event."""
        if self.tap.broken:
            raise self.tap.broken[0]

    @property
    def is_quiet(self) -> bool:
        stats = self.backend.stats()
        return (stats.running, stats.queued, stats.kv_blocks_used) == (0, 0, 0) and self.runtime.is_idle

    def check_settled(self) -> None:
        """Nothing runs or waits, everything has ended once, no task is left, and the events add up."""
        self.run(self._settled())

    async def _settled(self) -> None:
        broken, self.tap.broken = self.tap.broken, []
        try:
            await self.until(lambda: self.is_quiet)
            await self.until(lambda: len(asyncio.all_tasks()) <= self._tasks)
        finally:
            # The next test is not to suffer from what this one left.
            for generation in (*self.tap.generations, *self.tap.of_the_runtime):
                self.backend.cancel(generation)
            self.tap.forget()
        assert not broken, broken
        snapshot = await self.backend.snapshot()
        assert (snapshot is not None) == ("kv_events" in self.model.capabilities)
        if snapshot is not None:
            self.tap.replay.check(snapshot)

    async def _start(self) -> None:
        await self.runtime.start()
        # Engines begin some of their own tasks with their first request.
        await self.finish([self.request(self.prompt("the first", 20), 2)])
        self._tasks = len(asyncio.all_tasks())

    def _settings(self, flags: Sequence[str]) -> WorkerSettings:
        address = f"unix:{self.folder / 'worker.sock'}"
        return cast(WorkerSettings, load(self.setup.arguments(self.directory, "--listen", address, *flags), {}).settings)

    def _on_failure(self) -> None:
        self.failures += 1


async def _as_coroutine(awaited: Awaitable[Answer]) -> Answer:
    return await awaited
