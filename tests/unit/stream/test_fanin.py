"""Fan-in: choices interleave, failures become faults, and leaving stops what still runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.stream.mailbox import Arrival, FanIn, Mailbox, Producer, ReaderLeft, all_done
from penstock.wire.errors import GenerationFault, PenstockError
from penstock.wire.messages import Delta, Fault, Finish


class Script:
    """A generation whose tokens the test puts into its mailbox."""

    def __init__(self) -> None:
        self.mailbox: Mailbox | None = None
        self.cancels = 0

    def __call__(self, mailbox: Mailbox) -> Script:
        self.mailbox = mailbox
        return self

    def cancel(self) -> None:
        self.cancels += 1

    def put(self, *tokens: int) -> None:
        assert self.mailbox is not None
        self.mailbox.put(Delta(self.mailbox.next_offset, tokens))

    def finish(self) -> None:
        assert self.mailbox is not None
        self.mailbox.end(Finish("stop"))


@contextmanager
def running(*producers: Producer) -> Iterator[FanIn]:
    fan = FanIn(producers)
    fan.start()
    try:
        yield fan
    finally:
        fan.close()


async def test_producers_can_be_started_in_pieces() -> None:
    scripts = [Script() for _ in range(5)]
    fan = FanIn(scripts)
    fan.start(2)
    assert [script.mailbox is not None for script in scripts] == [True, True, False, False, False]
    scripts[1].put(1)
    assert await fan.receive() == [Arrival(1, Delta(0, (1,)), None)]
    fan.start(2)
    fan.close()
    assert [script.cancels for script in scripts] == [1, 1, 1, 1, 0], "what never began is not stopped"


async def test_choices_interleave_and_stay_in_order() -> None:
    first, second = Script(), Script()
    with running(first, second) as fan:
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


async def test_what_comes_while_the_reader_is_busy_is_one_arrival_per_choice() -> None:
    first, second = Script(), Script()
    with running(first, second) as fan:
        for token in range(3):
            first.put(token)
            second.put(10 + token)
        first.finish()
        assert await fan.receive() == [Arrival(0, Delta(0, (0, 1, 2)), Finish("stop")), Arrival(1, Delta(0, (10, 11, 12)), None)]


async def test_a_cancelled_receive_loses_nothing() -> None:
    producer = Script()
    with running(producer) as fan:
        reading = asyncio.create_task(fan.receive())
        await asyncio.sleep(0)
        producer.put(1)
        reading.cancel()  # the wake-up is on its way already
        with pytest.raises(asyncio.CancelledError):
            await reading
        producer.put(2)
        assert await fan.receive() == [Arrival(0, Delta(0, (1, 2)), None)]


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (GenerationFault(Fault("no_worker", "none is there")), Fault("no_worker", "none is there")),
        (PenstockError("no luck"), Fault("PenstockError", "no luck")),
    ],
)
async def test_a_producer_that_refuses_to_start_gives_its_choice_a_fault(error: PenstockError, fault: Fault) -> None:
    def refuse(_: Mailbox) -> Script:
        raise error

    other = Script()
    with running(refuse, other) as fan:
        other.put(1)
        assert await fan.receive() == [Arrival(0, None, fault), Arrival(1, Delta(0, (1,)), None)]
    assert other.cancels == 1


class Stubborn(Script):
    """Cannot be cancelled: an error of ours."""

    def cancel(self) -> None:
        super().cancel()
        raise ZeroDivisionError


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit])
async def test_a_start_that_breaks_off_stops_all_that_was_started(error: type[BaseException]) -> None:
    def broken(_: Mailbox) -> Script:
        raise error

    first, second, never = Stubborn(), Script(), Script()
    fan = FanIn([first, second, broken, never])
    with pytest.raises(error):
        fan.start()
    assert [script.cancels for script in (first, second, never)] == [1, 1, 0]
    assert never.mailbox is None
    second.put(1)
    assert fan.late_puts == 1, "nobody reads it any more"


async def test_an_error_while_one_is_stopped_stops_the_others_too() -> None:
    scripts = [Script(), Stubborn(), Script(), Stubborn(), Script()]
    fan = FanIn(scripts)
    fan.start()
    with pytest.raises(ZeroDivisionError):
        fan.close()
    assert [script.cancels for script in scripts] == [1] * 5


async def test_the_client_leaving_wakes_a_waiting_reader() -> None:
    producer = Script()
    with running(producer) as fan:
        reading = asyncio.create_task(fan.receive())
        await asyncio.sleep(0)
        fan.interrupt(ReaderLeft())
        with pytest.raises(ReaderLeft):
            await reading
    assert producer.cancels == 1


async def test_puts_after_leaving_are_counted() -> None:
    producer = Script()
    with running(producer) as fan:
        pass
    assert producer.mailbox is not None
    producer.mailbox.put(Delta(0, (1,)))
    assert fan.late_puts == 1


async def test_a_dropped_choice_says_nothing_more_and_the_others_go_on() -> None:
    dropped, other = Script(), Script()
    with running(dropped, other) as fan:
        dropped.put(1)
        other.put(2)
        fan.drop(0)
        assert dropped.cancels == 1
        assert await fan.receive() == [Arrival(1, Delta(0, (2,)), None)]
        other.finish()
        assert await fan.receive() == [Arrival(1, None, Finish("stop"))]


async def test_all_done_goes_on_when_it_is_cancelled_meanwhile() -> None:
    may_end = asyncio.Event()

    async def slow() -> None:
        await may_end.wait()

    task = asyncio.create_task(slow())
    waiting = asyncio.create_task(all_done([task]))
    for _ in range(2):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.wait([waiting], timeout=0)
    assert not waiting.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert task.done()
