"""Grammars for engines that give them to the llguidance library themselves: checked here, so that what is wrong is told as our own
engine tells it, and handed over in Lark, the one form that all of them take."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import Executor, ThreadPoolExecutor

from penstock.backends.external.engine import EngineRefused
from penstock.engine.compiling import LONGEST_QUEUE, MOST_KEPT, MOST_SECONDS, THREADS
from penstock.grammar.grammar import GrammarCompiler
from penstock.wire.errors import GrammarError
from penstock.wire.messages import Fault, Grammar


class _Compilation:
    """One grammar on its way, or what came of it, for all who wait for it: none of them can cancel it."""

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar, executor: Executor) -> None:
        self._loop = asyncio.get_running_loop()
        self._began: asyncio.Future[float] = self._loop.create_future()
        self._lark = self._loop.run_in_executor(executor, self._compile, compiler, grammar)
        # Perhaps nobody is left to see what is wrong.
        self._lark.add_done_callback(lambda lark: lark.cancelled() or lark.exception())

    async def lark(self) -> str:
        """Raises GrammarError for what is wrong or takes too long, EngineRefused where it did not come to its turn."""
        try:
            async with asyncio.timeout(LONGEST_QUEUE):
                began = await asyncio.shield(self._began)
        except TimeoutError as error:
            message = "other grammars are being compiled for too long; try again"
            raise EngineRefused(Fault("grammar_queue", message, retryable=True)) from error
        try:
            async with asyncio.timeout_at(began + MOST_SECONDS):
                return await asyncio.shield(self._lark)
        except TimeoutError as error:
            raise GrammarError(f"the grammar takes more than {MOST_SECONDS:g} seconds to compile: make it simpler") from error

    def _compile(self, compiler: GrammarCompiler, grammar: Grammar) -> str:
        """In a thread."""
        self._loop.call_soon_threadsafe(lambda: self._began.set_result(self._loop.time()))
        return compiler.lark(grammar)


class LarkGrammars:
    """See `Grammars`. Each grammar is compiled once, in a thread, however many ask for it, and what came of it is kept for those
    to come."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar compiler")
        self._known: OrderedDict[Grammar, _Compilation] = OrderedDict()

    async def lark(self, grammar: Grammar) -> str:
        known = self._known.get(grammar)
        if known is None:
            known = self._known[grammar] = _Compilation(self._compiler, grammar, self._executor)
            if len(self._known) > MOST_KEPT:
                self._known.popitem(last=False)
        self._known.move_to_end(grammar)
        return await known.lark()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
