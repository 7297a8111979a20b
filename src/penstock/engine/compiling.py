"""Generations whose grammar is being compiled, beside the steps."""

from __future__ import annotations

import concurrent.futures
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from penstock.engine.grammar import GrammarCompiler, GrammarMatcher
from penstock.engine.sequence import Sequence
from penstock.wire.errors import GrammarError
from penstock.wire.messages import Fault, Grammar

THREADS = 2
MOST_SECONDS = 10.0
MOST_KEPT = 128


class Compilations:
    """Each grammar is compiled once, however many generations ask for it, and kept for those to come."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar compiler")
        self._grammars: OrderedDict[Grammar, Future[GrammarMatcher]] = OrderedDict()
        self._waiting: dict[bytes, tuple[Sequence, Future[GrammarMatcher], float]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence, _, _ in self._waiting.values())

    def add(self, sequence: Sequence, now: float) -> None:
        grammar = sequence.request.grammar
        assert grammar is not None
        compiled = self._grammars.get(grammar)
        if compiled is None:
            compiled = self._grammars[grammar] = self._executor.submit(self._compiler.compile, grammar)
            if len(self._grammars) > MOST_KEPT:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(grammar)
        self._waiting[sequence.request.id] = sequence, compiled, now

    def remove(self, generation: bytes) -> Sequence | None:
        found = self._waiting.pop(generation, None)
        return None if found is None else found[0]

    def wait(self, seconds: float) -> None:
        """Until one is compiled, or so long."""
        concurrent.futures.wait([future for _, future, _ in self._waiting.values()], seconds, concurrent.futures.FIRST_COMPLETED)

    def take(self, now: float) -> list[tuple[Sequence, Fault | None]]:
        """Those whose grammar is there, or why there is none."""
        ready = [item for item in self._waiting.values() if item[1].done() or now - item[2] > MOST_SECONDS]
        for sequence, _, _ in ready:
            del self._waiting[sequence.request.id]
        return [(sequence, _equip(sequence, future)) for sequence, future, _ in ready]

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _equip(sequence: Sequence, compiled: Future[GrammarMatcher]) -> Fault | None:
    """Gives the sequence its own matcher, at the place where its text is when it goes on from the middle."""
    if not compiled.done():
        return Fault("invalid_grammar", f"the grammar takes more than {MOST_SECONDS:g} seconds to compile: make it simpler")
    try:
        sequence.matcher = compiled.result().clone()
        sequence.matcher.replay(sequence.request.token_ids[len(sequence.request.token_ids) - sequence.request.offset :])
    except GrammarError as error:
        return Fault("invalid_grammar", str(error))
    return None
