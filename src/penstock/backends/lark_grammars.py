"""Grammars for engines that give them to the llguidance library themselves: checked here, so that what is wrong is told as our own
engine tells it, and handed over in Lark, the one form that all of them take."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from penstock.engine.compiling import MOST_KEPT, MOST_SECONDS, THREADS
from penstock.engine.grammar import GrammarCompiler
from penstock.wire.errors import GrammarError
from penstock.wire.messages import Grammar


class LarkGrammars:
    """See `driven.Grammars`. Each grammar is compiled once, in a thread, and what came of it is kept for those to come."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar compiler")
        self._known: OrderedDict[Grammar, str] = OrderedDict()

    async def lark(self, grammar: Grammar) -> str:
        known = self._known.get(grammar)
        if known is not None:
            self._known.move_to_end(grammar)
            return known
        compiling = asyncio.get_running_loop().run_in_executor(self._executor, self._compiler.lark, grammar)
        try:
            async with asyncio.timeout(MOST_SECONDS):
                lark = self._known[grammar] = await compiling
        except TimeoutError as error:
            raise GrammarError(f"the grammar takes more than {MOST_SECONDS:g} seconds to compile: make it simpler") from error
        if len(self._known) > MOST_KEPT:
            self._known.popitem(last=False)
        return lark

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
