"""Generations whose grammar is being compiled, beside the steps."""

from __future__ import annotations

import concurrent.futures
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from penstock.engine.sequence import Sequence
from penstock.grammar.grammar import GrammarCompiler, GrammarMatcher
from penstock.wire.errors import GrammarError
from penstock.wire.messages import Fault, Grammar

log = logging.getLogger(__name__)

THREADS = 2
MOST_SECONDS = 10.0
LONGEST_QUEUE = 60.0
MOST_KEPT = 128


class _Compilation:
    """One grammar on its way. `began` is set by the thread that compiles it."""

    def __init__(self) -> None:
        self.began: float | None = None
        self.matcher: Future[GrammarMatcher] | None = None


class Compilations:
    """Each grammar is compiled once, however many generations ask for it, and kept for those to come."""

    def __init__(self, compiler: GrammarCompiler, clock: Callable[[], float]) -> None:
        self._compiler = compiler
        self._clock = clock
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar compiler")
        self._grammars: OrderedDict[Grammar, _Compilation] = OrderedDict()
        self._waiting: dict[bytes, tuple[Sequence, _Compilation, float]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence, _, _ in self._waiting.values())

    def add(self, sequence: Sequence) -> None:
        grammar = sequence.request.grammar
        assert grammar is not None
        compilation = self._grammars.get(grammar)
        if compilation is None:
            compilation = self._grammars[grammar] = _Compilation()
            compilation.matcher = self._executor.submit(self._compile, compilation, grammar)
            if len(self._grammars) > MOST_KEPT:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(grammar)
        self._waiting[sequence.request.id] = sequence, compilation, self._clock()

    def remove(self, generation: bytes) -> Sequence | None:
        found = self._waiting.pop(generation, None)
        return None if found is None else found[0]

    def wait(self, seconds: float) -> None:
        """Until one is compiled, or so long."""
        futures = [compilation.matcher for _, compilation, _ in self._waiting.values() if compilation.matcher is not None]
        concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_COMPLETED)

    def take(self) -> list[tuple[Sequence, Fault | None]]:
        """Those whose grammar is there, or why there is none."""
        taken: list[tuple[Sequence, Fault | None]] = []
        for generation, (sequence, compilation, since) in list(self._waiting.items()):
            fault = self._too_long(compilation, since)
            if fault is not None or (compilation.matcher is not None and compilation.matcher.done()):
                del self._waiting[generation]
                taken.append((sequence, fault or _equip(sequence, compilation)))
        return taken

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _compile(self, compilation: _Compilation, grammar: Grammar) -> GrammarMatcher:
        compilation.began = self._clock()
        return self._compiler.compile(grammar)

    def _too_long(self, compilation: _Compilation, since: float) -> Fault | None:
        now = self._clock()
        if compilation.matcher is None or compilation.matcher.done():
            return None
        if compilation.began is not None and now - compilation.began > MOST_SECONDS:
            return Fault("invalid_grammar", f"the grammar takes more than {MOST_SECONDS:g} seconds to compile: make it simpler")
        if now - since > LONGEST_QUEUE:
            return Fault("grammar_queue", "other grammars are being compiled for too long; try again", retryable=True)
        return None


def _equip(sequence: Sequence, compilation: _Compilation) -> Fault | None:
    """Gives the sequence its own matcher, at the place where its text is when it goes on from the middle."""
    assert compilation.matcher is not None
    try:
        sequence.matcher = compilation.matcher.result().clone()
        sequence.matcher.replay(sequence.request.token_ids[len(sequence.request.token_ids) - sequence.request.offset :])
    except GrammarError as error:
        return Fault("invalid_grammar", str(error))
    except Exception as error:  # the library's: it must end this generation and no other
        log.exception("a grammar could not be compiled")
        return Fault("invalid_grammar", f"the grammar could not be compiled: {error}")
    return None
