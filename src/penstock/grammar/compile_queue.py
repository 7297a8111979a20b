"""Grammars are compiled in threads, beside an engine's steps or the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from penstock.wire.errors import GrammarError
from penstock.wire.messages import Fault, Grammar

log = logging.getLogger(__name__)

Compiled = TypeVar("Compiled")

THREADS = 2
MAX_COMPILE_SECONDS = 10.0
MAX_QUEUE_SECONDS = 60.0
MAX_KEPT = 128
MAX_WAITING = 512
"""Grammars of one tenant that wait for a thread. More could not be compiled in MAX_QUEUE_SECONDS."""

_QUEUE_FULL = Fault("grammar_queue", "too many grammars are waiting to be compiled; try again", retryable=True)


class _Compilation(NamedTuple, Generic[Compiled]):
    """One grammar. `started` is when a thread began to compile it."""

    grammar: Grammar
    started: Future[float]
    result: Future[Compiled | Fault]


@dataclass(eq=False)
class _Lane(Generic[Compiled]):
    """The grammars of one tenant: results by root and grammar, the last used last; how many are in threads; and which wait for one."""

    kept: OrderedDict[tuple[bytes, Grammar], _Compilation[Compiled]] = field(default_factory=OrderedDict)
    under_way: int = 0
    waiting: deque[_Compilation[Compiled]] = field(default_factory=deque)


@dataclass(eq=False)
class CompileQueue(Generic[Compiled]):
    """Compiles each grammar once per tenant and root, however many generations wait for it, and keeps the last MAX_KEPT results.

    Tenants and roots share no results: the waiting time would tell whether others have used the same grammar. If tenants share the queue,
    each has one grammar in a thread at a time. So the slow grammars of one tenant, however many, leave a thread to the others. When there
    are too many results, the tenant with the most loses its oldest.
    """

    compile_grammar: Callable[[Grammar], Compiled]
    clock: Callable[[], float] = time.monotonic
    max_compile_seconds: float = MAX_COMPILE_SECONDS
    max_queue_seconds: float = MAX_QUEUE_SECONDS

    def __post_init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar compiler")
        # For `under_way` and `waiting`: the threads change them, too.
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane[Compiled]] = {}

    def request(self, grammar: Grammar, root: bytes = b"", lane: str = "") -> CompileRequest[Compiled]:
        """Starts or joins the compilation of a grammar. `lane` is the tenant, see Submit."""
        found, key = self._lanes.get(lane), (root, grammar)
        if found is None:
            found = self._lanes[lane] = _Lane()
        compilation = found.kept.get(key)
        if compilation is None:
            compilation = _Compilation(grammar, Future(), Future())
            if not self._begin(found, compilation, 1 if lane else THREADS):
                compilation.result.set_result(_QUEUE_FULL)
                return CompileRequest(self, compilation)
            found.kept[key] = compilation
            self._forget_oldest()
        else:
            found.kept.move_to_end(key)
        return CompileRequest(self, compilation)

    def close(self) -> None:
        """Drops what waits. A compilation that runs ends in its thread; nobody gets its result."""
        with self._lock:
            waiting = [compilation for lane in self._lanes.values() for compilation in lane.waiting]
            for lane in self._lanes.values():
                lane.waiting.clear()
        self._executor.shutdown(wait=False, cancel_futures=True)
        for compilation in waiting:
            compilation.result.cancel()

    def _begin(self, lane: _Lane[Compiled], compilation: _Compilation[Compiled], at_once: int) -> bool:
        """Returns whether there is room for it."""
        with self._lock:
            if lane.under_way >= at_once:
                if len(lane.waiting) >= MAX_WAITING:
                    return False
                lane.waiting.append(compilation)
                return True
            lane.under_way += 1
        self._submit(lane, compilation)
        return True

    def _submit(self, lane: _Lane[Compiled], compilation: _Compilation[Compiled]) -> None:
        job = self._executor.submit(self._run, lane, compilation)
        job.add_done_callback(lambda job: compilation.result.cancel() if job.cancelled() else None)

    def _run(self, lane: _Lane[Compiled], compilation: _Compilation[Compiled]) -> None:
        """In a thread."""
        compilation.started.set_result(self.clock())
        compilation.result.set_result(self._compile(compilation.grammar))
        with self._lock:
            following = lane.waiting.popleft() if lane.waiting else None
            lane.under_way -= following is None
        if following is not None:
            try:
                self._submit(lane, following)
            except RuntimeError:  # closed meanwhile
                following.result.cancel()

    def _compile(self, grammar: Grammar) -> Compiled | Fault:
        try:
            return self.compile_grammar(grammar)
        except GrammarError as error:
            return Fault("invalid_grammar", str(error))
        except Exception as error:
            log.exception("a grammar could not be compiled")
            return Fault("invalid_grammar", f"the grammar could not be compiled: {error}")

    def _forget_oldest(self) -> None:
        if sum([len(lane.kept) for lane in self._lanes.values()]) <= MAX_KEPT:
            return
        largest = max(self._lanes.values(), key=lambda lane: len(lane.kept))
        largest.kept.popitem(last=False)
        if len(self._lanes) > MAX_KEPT:
            with self._lock:
                self._lanes = {name: lane for name, lane in self._lanes.items() if lane.kept or lane.under_way}


class CompileRequest(Generic[Compiled]):
    """One generation that waits for a grammar. It can stop waiting at any time; the compilation goes on for others."""

    def __init__(self, queue: CompileQueue[Compiled], compilation: _Compilation[Compiled]) -> None:
        self._queue = queue
        self._compilation = compilation
        self._since = queue.clock()

    def poll(self) -> Compiled | Fault | None:
        """The compiled grammar, or why there will be none; None while it is being compiled."""
        if self._compilation.result.done():
            return self._compilation.result.result()
        if self._queue.clock() < self._deadline:
            return None
        if self._compilation.started.done():
            seconds = self._queue.max_compile_seconds
            return Fault("invalid_grammar", f"the grammar takes more than {seconds:g} seconds to compile: make it simpler")
        return _QUEUE_FULL

    async def wait(self) -> Compiled | Fault:
        """The compiled grammar, or why there is none."""
        started, result = self._compilation.started, self._compilation.result
        while (outcome := self.poll()) is None:
            # `asyncio.wait` does not cancel what it waits for.
            next_event: Future[float] | Future[Compiled | Fault] = result if started.done() else started
            await asyncio.wait([asyncio.wrap_future(next_event)], timeout=self._deadline - self._queue.clock())
        return outcome

    @property
    def result(self) -> Future[Compiled | Fault]:
        return self._compilation.result

    @property
    def _deadline(self) -> float:
        """Waiting for a thread and compiling have limits of their own: a grammar behind slow ones is not to blame for them."""
        if self._compilation.started.done():
            return self._compilation.started.result() + self._queue.max_compile_seconds
        return self._since + self._queue.max_queue_seconds


def wait_for_any(requests: Iterable[CompileRequest[Compiled]], seconds: float) -> None:
    """Waits until one of them is compiled, at most `seconds`."""
    concurrent.futures.wait([request.result for request in requests], seconds, concurrent.futures.FIRST_COMPLETED)
