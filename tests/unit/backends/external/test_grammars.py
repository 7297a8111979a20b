"""Grammars on their way to an engine of others."""

from __future__ import annotations

import asyncio
import threading

import pytest

from penstock.backends.external import grammars as lark_grammars
from penstock.backends.external.engine import EngineRefused
from penstock.backends.external.grammars import LarkGrammars
from penstock.engine.compiling import MOST_KEPT, THREADS
from penstock.grammar.grammar import GrammarCompiler
from penstock.wire.errors import GrammarError
from penstock.wire.messages import Grammar
from tokenizer_kinds import byte_level

TOKENIZER = byte_level(["</s>"])


class Counting(GrammarCompiler):
    """The real one, which counts and can be made to take its time."""

    def __init__(self) -> None:
        super().__init__(TOKENIZER.to_str(), TOKENIZER.get_vocab_size(), frozenset({0}))
        self.calls = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def lark(self, grammar: Grammar) -> str:
        self.calls += 1
        if grammar.source != "quick":
            self.may_go_on.wait(5)
        return super().lark(grammar)


async def test_each_is_converted_once() -> None:
    compiler = Counting()
    grammars = LarkGrammars(compiler)
    assert await grammars.lark(Grammar("regex", "a+")) == await grammars.lark(Grammar("regex", "a+")) == "start: /a+/"
    assert compiler.calls == 1
    grammars.close()


async def test_those_who_come_while_it_is_converted_wait_for_it() -> None:
    compiler = Counting()
    compiler.may_go_on.clear()
    grammars = LarkGrammars(compiler)
    first, *others = [asyncio.create_task(grammars.lark(Grammar("regex", "a+"))) for _ in range(5)]
    while not compiler.calls:
        await asyncio.sleep(0)
    # Who no longer wants it takes it from nobody.
    first.cancel()
    await asyncio.wait([first])
    compiler.may_go_on.set()
    assert await asyncio.gather(*others) == ["start: /a+/"] * 4
    assert compiler.calls == 1
    grammars.close()


async def test_one_that_waits_for_slow_ones_is_not_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lark_grammars, "MOST_SECONDS", 0.05)
    compiler = Counting()
    compiler.may_go_on.clear()
    grammars = LarkGrammars(compiler)
    slow = [grammars.lark(Grammar("regex", f"a{number}")) for number in range(THREADS)]
    refused = asyncio.gather(*slow, return_exceptions=True)
    quick = asyncio.create_task(grammars.lark(Grammar("regex", "quick")))
    assert all(isinstance(error, GrammarError) for error in await refused)
    compiler.may_go_on.set()
    assert await quick == "start: /quick/"
    grammars.close()


async def test_one_that_waits_for_too_long_can_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lark_grammars, "LONGEST_QUEUE", 0.05)
    compiler = Counting()
    compiler.may_go_on.clear()
    grammars = LarkGrammars(compiler)
    slow = [asyncio.create_task(grammars.lark(Grammar("regex", f"a{number}"))) for number in range(THREADS)]
    while compiler.calls < THREADS:
        await asyncio.sleep(0)
    with pytest.raises(EngineRefused) as refused:
        await grammars.lark(Grammar("regex", "quick"))
    assert (refused.value.fault.code, refused.value.fault.retryable) == ("grammar_queue", True)
    compiler.may_go_on.set()
    assert await asyncio.gather(*slow) == [f"start: /a{number}/" for number in range(THREADS)]
    grammars.close()


async def test_only_so_many_are_kept() -> None:
    compiler = Counting()
    grammars = LarkGrammars(compiler)
    for number in range(MOST_KEPT + 1):
        await grammars.lark(Grammar("regex", f"a{number}"))
    await grammars.lark(Grammar("regex", "a1"))
    assert compiler.calls == MOST_KEPT + 1
    await grammars.lark(Grammar("regex", "a0"))
    assert compiler.calls == MOST_KEPT + 2
    grammars.close()


async def test_what_is_wrong_is_told() -> None:
    grammars = LarkGrammars(Counting())
    for _ in range(2):
        with pytest.raises(GrammarError, match="unclosed group at character 2 of the regex"):
            await grammars.lark(Grammar("regex", "a("))
    grammars.close()


async def test_one_that_takes_too_long_is_refused_and_the_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lark_grammars, "MOST_SECONDS", 0.05)
    compiler = Counting()
    compiler.may_go_on.clear()
    grammars = LarkGrammars(compiler)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0)
            ticks += 1

    ticking = asyncio.create_task(tick())
    with pytest.raises(GrammarError, match=r"more than 0\.05 seconds"):
        await grammars.lark(Grammar("regex", "a+"))
    assert ticks > 10
    with pytest.raises(GrammarError, match=r"more than 0\.05 seconds"):
        await grammars.lark(Grammar("regex", "a+"))
    assert compiler.calls == 1
    ticking.cancel()
    await asyncio.wait([ticking])
    compiler.may_go_on.set()
    grammars.close()
