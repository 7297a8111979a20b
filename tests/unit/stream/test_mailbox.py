"""The mailbox against a model: puts, takes, cancels, terminals and late puts in every order."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.stream.slot import COMPACT_AT
from penstock.wire.errors import GapError, OverlapError, PutAfterTerminal, StreamError
from penstock.wire.images import image_ids
from penstock.wire.messages import Delta, Fault, Finish, Terminal

TERMINALS = st.sampled_from([Finish("stop"), Finish("length"), Fault("lost", "the worker is gone", retryable=True)])


class MailboxMachine(RuleBasedStateMachine):
    """Two mailboxes behind one doorbell, each against a plain list of what was put and what was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.bell = Doorbell(self.loop)
        self.boxes = [Mailbox(self.bell, index) for index in range(2)]
        self.put_tokens: list[list[int]] = [[], []]
        self.taken_tokens: list[list[int]] = [[], []]
        self.terminals: list[Terminal | None] = [None, None]
        self.taken_terminals: list[Terminal | None] = [None, None]
        self.rung: set[int] = set()
        self.late = [0, 0]

    def teardown(self) -> None:
        self.loop.close()

    def waits(self, box: int) -> bool:
        tokens = len(self.put_tokens[box]) > len(self.taken_tokens[box])
        return tokens or (self.terminals[box] is not None and self.taken_terminals[box] is None)

    @rule(box=st.integers(0, 1), tokens=st.lists(st.integers(0, 99), min_size=1, max_size=5), times=st.integers(1, COMPACT_AT + 3))
    def put(self, box: int, tokens: list[int], times: int) -> None:
        for _ in range(times):
            delta = Delta(len(self.put_tokens[box]), tuple(tokens))
            if self.boxes[box].cancelled:
                self.boxes[box].put(delta)
                self.late[box] += 1
            elif self.terminals[box] is not None:
                with pytest.raises(PutAfterTerminal):
                    self.boxes[box].put(delta)
            else:
                self.boxes[box].put(delta)
                self.put_tokens[box] += tokens
                self.rung.add(box)

    @rule(box=st.integers(0, 1), distance=st.integers(-3, 3).filter(bool))
    def put_out_of_sequence(self, box: int, distance: int) -> None:
        delta = Delta(max(0, len(self.put_tokens[box]) + distance), (1,))
        if self.boxes[box].cancelled or delta.offset == len(self.put_tokens[box]):
            return
        expected: type[StreamError] = PutAfterTerminal if self.terminals[box] is not None else GapError if distance > 0 else OverlapError
        with pytest.raises(expected):
            self.boxes[box].put(delta)

    @rule(box=st.integers(0, 1), terminal=TERMINALS)
    def end(self, box: int, terminal: Terminal) -> None:
        if self.boxes[box].cancelled:
            self.boxes[box].end(terminal)
            self.late[box] += 1
        elif self.terminals[box] is not None:
            with pytest.raises(PutAfterTerminal):
                self.boxes[box].end(terminal)
        else:
            self.boxes[box].end(terminal)
            self.terminals[box] = terminal
            self.rung.add(box)

    @rule()
    def answer(self) -> None:
        ready = [mailbox for mailbox in self.bell.answer() if not mailbox.cancelled]
        assert {mailbox.index for mailbox in ready} == {box for box in self.rung if not self.boxes[box].cancelled}
        assert len(ready) == len({mailbox.index for mailbox in ready}), "rung twice for one answer"
        self.rung.clear()
        for mailbox in ready:
            self.take(mailbox.index)

    def take(self, box: int) -> None:
        delta, terminal = self.boxes[box].take()
        if delta is not None:
            assert delta.offset == len(self.taken_tokens[box])
            self.taken_tokens[box] += delta.token_ids
        # The terminal comes with the last of the tokens or after it, never before.
        if terminal is not None:
            assert self.taken_terminals[box] is None
            self.taken_terminals[box] = terminal
        assert self.taken_tokens[box] == self.put_tokens[box]
        assert self.taken_terminals[box] == self.terminals[box]

    @rule()
    def a_cancelled_wait_loses_nothing(self) -> None:
        async def wait_and_cancel() -> None:
            waiting = asyncio.ensure_future(self.bell.wait())
            waiting.cancel()

        self.loop.run_until_complete(wait_and_cancel())

    @precondition(lambda self: self.rung)
    @rule()
    def a_wait_ends_at_once_when_something_is_there(self) -> None:
        async def wait() -> None:
            async with asyncio.timeout(5):
                await self.bell.wait()

        self.loop.run_until_complete(wait())

    @rule(box=st.integers(0, 1))
    def cancel(self, box: int) -> None:
        self.boxes[box].cancel()

    @invariant()
    def agrees(self) -> None:
        for box, mailbox in enumerate(self.boxes):
            assert mailbox.late_puts == self.late[box]
            if not mailbox.cancelled:
                assert mailbox.is_empty == (not self.waits(box))
                assert mailbox.ended == (self.terminals[box] is not None)
                assert mailbox.next_offset == len(self.put_tokens[box])


TestMailbox = MailboxMachine.TestCase
TestMailbox.settings = settings(max_examples=200, stateful_step_count=40)


async def test_a_reader_far_behind_costs_few_deltas() -> None:
    mailbox = Mailbox(Doorbell())
    for offset in range(10_000):
        mailbox.put(Delta(offset, (offset,)))
    assert len(mailbox._pending) < COMPACT_AT
    delta, _ = mailbox.take()
    assert delta is not None
    assert delta.token_ids == tuple(range(10_000))


async def test_tokens_before_a_fault_are_delivered_with_it() -> None:
    mailbox = Mailbox(Doorbell())
    mailbox.put(Delta(0, (1, 2)))
    mailbox.end(Fault("lost", "gone"))
    assert mailbox.take() == (Delta(0, (1, 2)), Fault("lost", "gone"))
    assert mailbox.take() == (None, None)


async def test_an_id_that_no_model_makes_ends_the_stream() -> None:
    """Such as a position of an image. The reader is woken for the fault that follows."""
    bell = Doorbell()
    mailbox = Mailbox(bell)
    with pytest.raises(StreamError, match="offset 0 has an id that no model makes"):
        mailbox.put(Delta(0, (1, image_ids(bytes(16), 1)[0])))
    mailbox.end(Fault("stream_breach", "broken"))
    async with asyncio.timeout(5):
        await bell.wait()
    assert mailbox.take() == (None, Fault("stream_breach", "broken"))
