"""Grammars are compiled in threads, beside an engine's steps or the event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from penstock.wire.errors import GrammarError
from penstock.wire.messages import Fault, Grammar

log = logging.getLogger(__name__)

Compiled = TypeVar("Compiled")

THREADS = 2
MAX_COMPILE_SECONDS = 10.0
MAX_QUEUE_SECONDS = 60.0
MAX_KEPT = 128


@dataclass(eq=False)
class CompileQueue(Generic[Compiled]):
    """Compiles each grammar once, however many generations wait for it, and keeps the last MAX_KEPT results.

    Once for each root: otherwise a wait would tell one tenant whether another has used the same grammar.
    """

    compile_grammar: Callable[[Grammar], Compiled]
    clock: Callable[[], float] = time.monotonic
    max_compile_seconds: float = MAX_COMPILE_SECONDS
    max_queue_seconds: float = MAX_QUEUE_SECONDS

    def __post_init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar compiler")
        self._compilations: OrderedDict[tuple[bytes, Grammar], _Compilation[Compiled]] = OrderedDict()

    def request(self, grammar: Grammar, root: bytes = b"") -> CompileRequest[Compiled]:
        """Starts or joins the compilation of a grammar."""
        key = root, grammar
        compilation = self._compilations.get(key)
        if compilation is None:
            started: Future[float] = Future()
            result = self._executor.submit(self._run, grammar, started)
            compilation = self._compilations[key] = _Compilation(started, result)
            if len(self._compilations) > MAX_KEPT:
                self._compilations.popitem(last=False)
        self._compilations.move_to_end(key)
        return CompileRequest(self, compilation)

    def close(self) -> None:
        """Drops what waits. A compilation that runs ends in its thread; nobody gets its result."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run(self, grammar: Grammar, started: Future[float]) -> Compiled | Fault:
        """In a thread."""
        started.set_result(self.clock())
        try:
            return self.compile_grammar(grammar)
        except GrammarError as error:
            return Fault("invalid_grammar", str(error))
        except Exception as error:
            log.exception("a grammar could not be compiled")
            return Fault("invalid_grammar", f"the grammar could not be compiled: {error}")


class _Compilation(NamedTuple, Generic[Compiled]):
    """One grammar. `started` is when a thread began to compile it."""

    started: Future[float]
    result: Future[Compiled | Fault]


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
        return Fault("grammar_queue", "too many grammars are waiting to be compiled; try again", retryable=True)

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
