"""Fan-in, driven by events: interleaving, failure, cancellation from outside, the client leaving, cleanup."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from penstock.stream.fanin import Arrival, FanIn, ReaderLeft
from penstock.stream.mailbox import Mailbox
from penstock.wire.errors import GenerationFault, PenstockError
from penstock.wire.messages import Delta, Fault, Finish


class Script:
    """A producer that does what the test tells it, when the test tells it, and records how it ended."""

    def __init__(self) -> None:
        self.orders: asyncio.Queue[Callable[[Mailbox], None]] = asyncio.Queue()
        self.done_orders = 0
        self.mailbox: Mailbox | None = None
        self.started = asyncio.Event()
        self.cleaned_up = False
        self.may_clean_up = asyncio.Event()
        self.may_clean_up.set()
        self.task: asyncio.Task[None] | None = None

    async def __call__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.task = asyncio.current_task()
        self.started.set()
        try:
            while not mailbox.ended:
                order = await self.orders.get()
                order(mailbox)
        finally:
            await self.may_clean_up.wait()
            self.cleaned_up = True

    def put(self, *tokens: int) -> None:
        self.orders.put_nowait(lambda mailbox: _put(mailbox, tokens))

    def finish(self) -> None:
        self.orders.put_nowait(lambda mailbox: _end(mailbox))

    def fail(self, error: BaseException) -> None:
        def order(_: Mailbox) -> None:
            raise error

        self.orders.put_nowait(order)


def _put(mailbox: Mailbox, tokens: tuple[int, ...]) -> None:
    mailbox.put(Delta(mailbox.next_offset, tokens))


def _end(mailbox: Mailbox) -> None:
    mailbox.end(Finish("stop"))


async def test_choices_interleave_and_stay_in_order() -> None:
    first, second = Script(), Script()
    async with FanIn([first, second]) as fan:
        first.put(1)
        assert await fan.receive() == [Arrival(0, Delta(0, (1,)), None)]
        second.put(10)
        assert await fan.receive() == [Arrival(1, Delta(0, (10,)), None)]
        first.put(2)
        assert await fan.receive() == [Arrival(0, Delta(1, (2,)), None)]
        second.finish()
        assert await fan.receive() == [Arrival(1, None, Finish("stop"))]
        first.finish()
        assert await fan.receive() == [Arrival(0, None, Finish("stop"))]


async def test_what_comes_while_the_reader_is_busy_is_one_arrival_a_choice() -> None:
    first, second = Script(), Script()
    async with FanIn([first, second]) as fan:
        for token in range(3):
            first.put(token)
            second.put(10 + token)
        first.finish()
        await _orders_done(first, second)
        assert await fan.receive() == [Arrival(0, Delta(0, (0, 1, 2)), Finish("stop")), Arrival(1, Delta(0, (10, 11, 12)), None)]


async def test_a_cancelled_receive_loses_nothing() -> None:
    producer = Script()
    async with FanIn([producer]) as fan:
        reading = asyncio.create_task(fan.receive())
        await producer.started.wait()
        producer.put(1)
        await _orders_done(producer)
        reading.cancel()  # the wake-up is on its way already
        with pytest.raises(asyncio.CancelledError):
            await reading
        producer.put(2)
        await _orders_done(producer)
        assert await fan.receive() == [Arrival(0, Delta(0, (1, 2)), None)]


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (GenerationFault(Fault("worker_lost", "gone", retryable=True)), Fault("worker_lost", "gone", retryable=True)),
        (PenstockError("no luck"), Fault("PenstockError", "no luck")),
        (ZeroDivisionError("1/0"), Fault("internal_error", "ZeroDivisionError while generating")),
    ],
)
async def test_a_producer_that_fails_gives_its_choice_a_fault_after_its_tokens(error: Exception, fault: Fault) -> None:
    failing, other = Script(), Script()
    async with FanIn([failing, other]) as fan:
        failing.put(1)
        failing.fail(error)
        await failing.started.wait()
        assert failing.task is not None
        await asyncio.wait([failing.task])
        assert await fan.receive() == [Arrival(0, Delta(0, (1,)), fault)]
    assert other.cleaned_up


async def test_a_producer_cancelled_from_outside_is_a_fault_not_a_completion() -> None:
    producer = Script()
    async with FanIn([producer]) as fan:
        producer.put(1)
        assert await fan.receive() == [Arrival(0, Delta(0, (1,)), None)]
        assert producer.task is not None
        producer.task.cancel()
        (arrival,) = await fan.receive()
        assert isinstance(arrival.terminal, Fault)
        assert arrival.terminal.code == "producer_cancelled"


async def test_a_producer_that_returns_without_a_terminal_is_a_fault() -> None:
    async def returns_early(mailbox: Mailbox) -> None:
        mailbox.put(Delta(0, (1,)))

    async with FanIn([returns_early]) as fan:
        (arrival,) = await fan.receive()
        assert arrival.delta == Delta(0, (1,))
        assert isinstance(arrival.terminal, Fault)
        assert arrival.terminal.code == "no_terminal"


async def test_leaving_cancels_the_rest_and_awaits_their_cleanup() -> None:
    slow, other = Script(), Script()
    slow.may_clean_up.clear()
    left = asyncio.Event()

    async def read() -> None:
        async with FanIn([slow, other]) as fan:
            other.put(1)
            await fan.receive()
        left.set()

    reading = asyncio.create_task(read())
    await other.started.wait()
    assert other.task is not None
    await asyncio.wait([other.task])
    assert not left.is_set(), "left before the slow producer had cleaned up"
    slow.may_clean_up.set()
    await reading
    assert slow.cleaned_up
    assert other.cleaned_up


async def test_cleanup_is_awaited_even_when_the_reader_is_cancelled_meanwhile() -> None:
    slow = Script()
    slow.may_clean_up.clear()

    async def read() -> None:
        async with FanIn([slow]) as fan:
            await fan.receive()

    reading = asyncio.create_task(read())
    await slow.started.wait()
    reading.cancel()
    await asyncio.wait([reading], timeout=0)
    reading.cancel()
    await asyncio.wait([reading], timeout=0)
    assert not reading.done()
    slow.may_clean_up.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert slow.cleaned_up


async def test_what_was_begun_is_stopped_even_when_the_reader_leaves_at_once() -> None:
    begun: list[Mailbox] = []
    stopped: list[Mailbox] = []

    async def wait(mailbox: Mailbox) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(mailbox)

    def begin(mailbox: Mailbox) -> Coroutine[None, None, None]:
        begun.append(mailbox)
        return wait(mailbox)

    async with FanIn([begin, begin]):
        assert len(begun) == 2, "they did not begin when the fan-in was entered"
    assert stopped == begun


async def test_a_producer_that_refuses_to_begin_gives_its_choice_a_fault() -> None:
    def refuse(_: Mailbox) -> Coroutine[None, None, None]:
        raise GenerationFault(Fault("no_worker", "nobody is there"))

    async with FanIn([refuse]) as fan:
        assert await fan.receive() == [Arrival(0, None, Fault("no_worker", "nobody is there"))]


async def test_the_client_leaving_wakes_a_waiting_reader() -> None:
    producer = Script()
    with pytest.raises(ReaderLeft):
        async with FanIn([producer]) as fan:
            reading = asyncio.create_task(fan.receive())
            await producer.started.wait()
            fan.interrupt(ReaderLeft())
            await reading
    assert producer.cleaned_up


async def test_puts_after_leaving_are_counted() -> None:
    producer = Script()
    async with FanIn([producer]) as fan:
        await producer.started.wait()
    assert producer.mailbox is not None
    producer.mailbox.put(Delta(0, (1,)))
    assert fan.late_puts == 1


async def test_a_dropped_choice_says_nothing_more_and_the_others_go_on() -> None:
    dropped, other = Script(), Script()
    async with FanIn([dropped, other]) as fan:
        dropped.put(1)
        other.put(2)
        await _orders_done(dropped, other)
        fan.drop(0)
        assert await fan.receive() == [Arrival(1, Delta(0, (2,)), None)]
        other.finish()
        assert await fan.receive() == [Arrival(1, None, Finish("stop"))]
    assert dropped.cleaned_up


async def _orders_done(*scripts: Script) -> None:
    """Lets the producers run until none has an order left."""
    while not all(script.started.is_set() and script.orders.empty() for script in scripts):
        await asyncio.sleep(0)
