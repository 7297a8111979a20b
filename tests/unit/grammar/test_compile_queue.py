"""Grammars are compiled once, in threads, for all who wait: those that poll and those that await."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from penstock.grammar.compile_queue import MAX_KEPT, MAX_WAITING, THREADS, CompileQueue, wait_for_any
from penstock.wire.errors import GrammarError
from penstock.wire.messages import Fault, Grammar


class Compiler:
    """Counts its calls. Compiles grammars named "slow…" only when `gate` is set."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.gate = threading.Event()

    def __call__(self, grammar: Grammar) -> str:
        self.calls.append(grammar.source)
        if grammar.source.startswith("slow"):
            assert self.gate.wait(30)
        match grammar.source:
            case "wrong":
                raise GrammarError("unclosed group")
            case "odd":
                raise RuntimeError("something odd")
            case _:
                return grammar.source.upper()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.gate.set()


def regex(source: str) -> Grammar:
    return Grammar("regex", source)


async def test_each_grammar_is_compiled_once(compiler: Compiler) -> None:
    queue = CompileQueue(compiler)
    assert [await queue.request(regex("a")).wait() for _ in range(3)] == ["A"] * 3
    assert compiler.calls == ["a"]
    queue.close()


async def test_tenants_do_not_wait_less_for_a_grammar_of_another(compiler: Compiler) -> None:
    queue = CompileQueue(compiler)
    assert [await queue.request(regex("a"), root).wait() for root in (b"alice", b"mallory", b"", b"alice")] == ["A"] * 4
    assert compiler.calls == ["a"] * 3
    queue.close()


async def test_slow_grammars_of_one_tenant_leave_a_thread_to_others(compiler: Compiler) -> None:
    queue = CompileQueue(compiler)
    slow = [queue.request(regex(f"slow{number}"), b"a", "a") for number in range(MAX_WAITING + 1)]
    refused = await queue.request(regex("slow"), b"a", "a").wait()
    assert isinstance(refused, Fault)
    assert refused.code == "grammar_queue"
    assert [await queue.request(regex(f"quick{number}"), b"b", "b").wait() for number in range(3)] == ["QUICK0", "QUICK1", "QUICK2"]
    compiler.gate.set()
    assert [await request.wait() for request in slow] == [f"SLOW{number}" for number in range(MAX_WAITING + 1)]
    assert await queue.request(regex("slow"), b"a", "a").wait() == "SLOW", "a grammar that was refused can be tried again"
    queue.close()


async def test_grammars_of_one_tenant_leave_the_results_of_others(compiler: Compiler) -> None:
    queue = CompileQueue(compiler)
    await queue.request(regex("b"), b"b", "b").wait()
    for number in range(MAX_KEPT + 10):
        await queue.request(regex("a"), b"salt %d" % number, "a").wait()
    await queue.request(regex("b"), b"b", "b").wait()
    assert compiler.calls.count("b") == 1
    for source in ("c", "d"):
        for number in range(2 * MAX_KEPT):
            assert await queue.request(regex(source), b"", f"lane {number}").wait() == source.upper()
    queue.close()


async def test_requests_during_the_compilation_join_it(compiler: Compiler) -> None:
    queue = CompileQueue(compiler)
    first, *others = [asyncio.create_task(queue.request(regex("slow")).wait()) for _ in range(5)]
    while not compiler.calls:
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    compiler.gate.set()
    assert await asyncio.gather(*others) == ["SLOW"] * 4, "a request that leaves does not cancel the compilation"
    assert compiler.calls == ["slow"]
    queue.close()


async def test_the_results_of_the_last_ones_are_kept(compiler: Compiler) -> None:
    queue = CompileQueue(compiler)
    for number in range(MAX_KEPT + 1):
        await queue.request(regex(f"a{number}")).wait()
    await queue.request(regex("a1")).wait()
    assert len(compiler.calls) == MAX_KEPT + 1
    await queue.request(regex("a0")).wait()
    assert len(compiler.calls) == MAX_KEPT + 2
    queue.close()


async def test_a_result_that_is_used_again_is_kept_longer(compiler: Compiler) -> None:
    queue = CompileQueue(compiler)
    for number in range(MAX_KEPT):
        await queue.request(regex(f"a{number}")).wait()
    for source in ("a0", "new", "a0"):
        await queue.request(regex(source)).wait()
    assert compiler.calls.count("a0") == 1
    queue.close()


@pytest.mark.parametrize(("source", "message"), [("wrong", "unclosed group"), ("odd", "the grammar could not be compiled: something odd")])
async def test_an_error_becomes_a_fault_for_everyone(compiler: Compiler, source: str, message: str) -> None:
    queue = CompileQueue(compiler)
    for _ in range(2):
        assert await queue.request(regex(source)).wait() == Fault("invalid_grammar", message)
    assert compiler.calls == [source]
    queue.close()


async def test_a_slow_grammar_is_refused_and_the_one_behind_it_is_not(compiler: Compiler) -> None:
    queue = CompileQueue(compiler, max_compile_seconds=0.05)
    slow = [asyncio.create_task(queue.request(regex(f"slow{number}")).wait()) for number in range(THREADS)]
    quick = asyncio.create_task(queue.request(regex("quick")).wait())
    expected = Fault("invalid_grammar", "the grammar takes more than 0.05 seconds to compile: make it simpler")
    assert await asyncio.gather(*slow) == [expected] * THREADS
    compiler.gate.set()
    assert await quick == "QUICK"
    queue.close()


async def test_a_grammar_that_waits_too_long_for_a_thread_can_be_tried_again(compiler: Compiler) -> None:
    queue = CompileQueue(compiler, max_queue_seconds=0.05)
    slow = [asyncio.create_task(queue.request(regex(f"slow{number}")).wait()) for number in range(THREADS)]
    while len(compiler.calls) < THREADS:
        await asyncio.sleep(0)
    refused = await queue.request(regex("quick")).wait()
    assert isinstance(refused, Fault)
    assert (refused.code, refused.retryable) == ("grammar_queue", True)
    compiler.gate.set()
    assert await asyncio.gather(*slow) == ["SLOW0", "SLOW1"]
    queue.close()


def test_polling_sees_the_same_limits(compiler: Compiler) -> None:
    clock = Clock()
    queue = CompileQueue(compiler, clock)
    slow = [queue.request(regex(f"slow{number}")) for number in range(THREADS)]
    queued = queue.request(regex("quick"))
    wait_for_any(slow, 0.0)
    assert [request.poll() for request in (*slow, queued)] == [None] * 3
    while len(compiler.calls) < THREADS:
        pass
    clock.now = 11.0
    faults = [request.poll() for request in slow]
    assert [fault.code for fault in faults if isinstance(fault, Fault)] == ["invalid_grammar"] * THREADS
    assert queued.poll() is None, "the time of the slow ones is not its own"
    clock.now = 61.0
    fault = queued.poll()
    assert isinstance(fault, Fault)
    assert fault.code == "grammar_queue"
    compiler.gate.set()
    wait_for_any([queued], 30.0)
    assert queued.poll() == "QUICK"
    queue.close()


def test_a_request_that_joins_late_gets_no_more_time(compiler: Compiler) -> None:
    clock = Clock()
    queue = CompileQueue(compiler, clock)
    queue.request(regex("slow"))
    while not compiler.calls:
        pass
    clock.now = 8.0
    late = queue.request(regex("slow"))
    assert late.poll() is None
    clock.now = 11.0
    assert isinstance(late.poll(), Fault)
    queue.close()


def test_what_waits_when_the_queue_closes_is_dropped(compiler: Compiler) -> None:
    queue = CompileQueue(compiler)
    slow = [queue.request(regex(f"slow{number}")) for number in range(THREADS)]
    while len(compiler.calls) < THREADS:
        pass
    waiting = [queue.request(regex("quick"), b"", lane) for lane in ("", "a", "a")]
    queue.close()
    assert [request.result.cancelled() for request in waiting] == [True] * 3
    compiler.gate.set()
    assert [request.result.result(30) for request in slow] == ["SLOW0", "SLOW1"]
