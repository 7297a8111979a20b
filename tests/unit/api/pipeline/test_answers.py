"""One request's answer over ASGI, with a producer that does what the test says."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from front_end import WORDS, FrontEnd, request, says
from penstock.api.openai.completions import parse_completion
from penstock.api.pipeline.choice import Choice
from penstock.cluster.sessions.turn import Session
from penstock.config.front_end import Limits
from penstock.stream.mailbox import Mailbox
from penstock.wire.errors import GapError, GenerationFault, OverlapError
from penstock.wire.messages import Delta, Fault, Finish, Grammar, Submit

LOST = Fault("worker_lost", "the worker is gone", retryable=True)
WATER, RIVER = WORDS.encode(" water river")


async def test_tokens_that_come_with_a_fault_are_delivered_before_it() -> None:
    async def produce(_: Submit, mailbox: Mailbox) -> None:
        mailbox.put(Delta(0, (WATER,)))
        mailbox.put(Delta(1, (RIVER,)))
        raise GenerationFault(LOST)

    front_end = FrontEnd(produce)
    await front_end.post(stream=True)
    text, error = front_end.events
    assert text["choices"][0]["text"] == " water river"
    assert error["error"]["code"] == "worker_lost"
    assert b"[DONE]" not in front_end.body
    assert front_end.sent[-1]["more_body"] is False
    assert front_end.tally.tokens_delivered == 2
    assert front_end.tally.requests["completions", "broken_off"] == 1


async def test_a_fault_before_anything_came_is_a_status() -> None:
    async def produce(_: Submit, mailbox: Mailbox) -> None:
        raise GenerationFault(LOST)

    for stream in (True, False):
        front_end = FrontEnd(produce)
        await front_end.post(stream=stream)
        assert front_end.status == 503
        assert (b"retry-after", b"1") in front_end.sent[0]["headers"]


@pytest.mark.parametrize("code", ["invalid_grammar", "unsupported"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_grammar_that_the_worker_refuses_is_a_400_that_names_its_field(stream: bool, code: str) -> None:
    async def produce(request: Submit, mailbox: Mailbox) -> None:
        assert request.grammar == Grammar("regex", "(")
        raise GenerationFault(Fault(code, "unclosed group at character 1"))

    front_end = FrontEnd(produce)
    await front_end.post(stream=stream, structured_outputs={"regex": "("})
    assert front_end.status == 400
    assert json.loads(front_end.body)["error"] == {
        "message": "unclosed group at character 1",
        "type": "invalid_request_error",
        "param": "structured_outputs",
        "code": code,
    }
    assert front_end.tally.requests["completions", "fault"] == 1


async def test_a_fault_in_one_choice_stops_the_others() -> None:
    cancelled = asyncio.Event()

    async def produce(request: Submit, mailbox: Mailbox) -> None:
        if request.seed == 7:
            mailbox.put(Delta(0, (WATER,)))
            raise GenerationFault(LOST)
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    front_end = FrontEnd(produce)
    await front_end.post(stream=True, n=3, seed=7)
    assert front_end.events[-1]["error"]["code"] == "worker_lost"
    assert cancelled.is_set()


async def test_what_comes_while_the_socket_is_full_is_one_event() -> None:
    written, made = asyncio.Event(), asyncio.Event()

    async def produce(_: Submit, mailbox: Mailbox) -> None:
        mailbox.put(Delta(0, (WATER,)))
        await written.wait()
        for offset in range(1, 100):
            mailbox.put(Delta(offset, (RIVER,)))
            await asyncio.sleep(0)  # the reader has every chance to look
        mailbox.end(Finish("length"))
        made.set()

    front_end = FrontEnd(produce)
    front_end.socket_open.clear()
    answering = asyncio.create_task(front_end.post(stream=True, max_tokens=100))
    while not front_end.tally.running:
        await asyncio.sleep(0)
    written.set()
    await made.wait()
    assert not answering.done()
    front_end.socket_open.set()
    await answering
    assert [event["choices"][0]["text"] for event in front_end.events] == [" water", " river" * 99]
    assert front_end.body.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_leaves_cancels_its_generation_before_the_first_token() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def produce(_: Submit, mailbox: Mailbox) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    front_end = FrontEnd(produce)
    answering = asyncio.create_task(front_end.post(stream=True))
    await started.wait()
    front_end.gone.set()
    await answering
    assert cancelled.is_set()
    assert front_end.sent == []
    assert front_end.tally.clients_left == 1
    assert (front_end.tally.queued, front_end.tally.running) == (0, 0)


async def test_a_reader_that_stalls_is_cut_off() -> None:
    cancelled = asyncio.Event()

    async def produce(_: Submit, mailbox: Mailbox) -> None:
        mailbox.put(Delta(0, (WATER,)))
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    front_end = FrontEnd(produce, Limits(stall_seconds=0.05))
    watching = asyncio.create_task(front_end.admission.watch_stalls())
    front_end.socket_open.clear()
    answering = asyncio.create_task(front_end.post(stream=True))
    await asyncio.wait([answering], timeout=20)
    assert answering.cancelled()
    assert front_end.tally.readers_stalled == 1
    assert cancelled.is_set()
    watching.cancel()
    await asyncio.wait([watching])


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_beyond_a_stop_string_are_neither_delivered_nor_counted(stream: bool) -> None:
    cancelled = asyncio.Event()

    async def produce(_: Submit, mailbox: Mailbox) -> None:
        mailbox.put(Delta(0, (WATER, RIVER, WATER, WATER)))
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    front_end = FrontEnd(produce)
    await front_end.post(stream=stream, stop="er riv", **({"stream_options": {"include_usage": True}} if stream else {}))
    answer = front_end.events if stream else [json.loads(front_end.body)]
    assert answer[0]["choices"][0]["text"] == " wat"
    assert answer[0]["choices"][0]["finish_reason"] == "stop"
    assert answer[-1]["usage"]["completion_tokens"] == 2
    assert front_end.tally.tokens_delivered == 2
    assert cancelled.is_set(), "the worker goes on for nobody"


async def test_an_error_of_ours_is_a_500_and_no_silence() -> None:
    class Broken(FrontEnd):
        def produce(self, *_: object) -> asyncio.Task[None]:
            raise ZeroDivisionError

    front_end = Broken(says())
    with pytest.raises(ZeroDivisionError):
        await front_end.post()
    assert front_end.status == 500
    assert json.loads(front_end.body)["error"]["code"] == "internal_error"


async def test_the_last_hop_checks_offsets_once_more() -> None:
    plan, dialect = await parse_completion(*await request({"model": "m", "prompt": "x"}))
    choice = Choice(0, plan, dialect)
    assert choice.advance(Delta(0, (WATER,)), None) == ((" water",), None)
    with pytest.raises(GapError):
        choice.advance(Delta(2, (RIVER,)), None)
    with pytest.raises(OverlapError):
        choice.advance(Delta(0, (WATER,)), None)


async def test_an_engine_that_skips_tokens_is_a_fault() -> None:
    async def produce(_: Submit, mailbox: Mailbox) -> None:
        mailbox.put(Delta(0, (WATER,)))
        mailbox.put(Delta(2, (RIVER,)))

    front_end = FrontEnd(produce)
    await front_end.post(stream=True)
    assert front_end.events[0]["choices"][0]["text"] == " water"
    assert "expected the token at offset 1" in front_end.events[1]["error"]["message"]


CONTROL = {"session_control": {"session_id": "agent", "action": "open"}}


class Binding:
    """The binding of a session, under the test's control."""

    def __init__(self) -> None:
        self.front_end: FrontEnd | None = None

    def begin(self) -> asyncio.Future[None]:
        future: Any = asyncio.get_running_loop().create_future()
        self._session.binding_task = future
        return cast("asyncio.Future[None]", future)

    def end(self) -> None:
        future: Any = self._session.binding_task
        self._session.binding_task = None
        future.set_result(None)

    @property
    def _session(self) -> Session:
        assert self.front_end is not None
        assert self.front_end.turn.session is not None
        return self.front_end.turn.session


async def quiesce() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stop", [None, "river"])
async def test_an_answer_ends_when_its_session_is_bound(stream: bool, stop: str | None) -> None:
    binding = Binding()

    async def produce(_: Submit, mailbox: Mailbox) -> None:
        binding.begin()
        mailbox.put(Delta(0, (WATER, RIVER)))
        if stop is None:
            mailbox.end(Finish("length"))
        else:
            await asyncio.Event().wait()

    front_end = binding.front_end = FrontEnd(produce)
    await front_end.models.prepare(front_end.model)
    posted = asyncio.create_task(front_end.post(stream=stream, nvext=CONTROL, stop=stop))
    await quiesce()
    assert not posted.done()
    assert [event["choices"][0]["finish_reason"] for event in front_end.events] == ([None] if stream else [])
    if stream:
        assert front_end.events[0]["choices"][0]["text"].startswith(" water"), "tokens do not wait"
    binding.end()
    await posted
    answer = front_end.events[-1] if stream else json.loads(front_end.body)
    assert answer["choices"][0]["finish_reason"] == ("length" if stop is None else "stop")
    assert answer["nvext"]["session"]["id"] == "agent"
    texts = [event["choices"][0]["text"] for event in (front_end.events if stream else [answer])]
    assert "".join(texts) == (" water river" if stop is None else " water ")
    assert not stream or front_end.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_waits_for_the_binding_that_follows_another(stream: bool) -> None:
    binding = Binding()

    async def produce(_: Submit, mailbox: Mailbox) -> None:
        binding.begin()
        mailbox.put(Delta(0, (WATER,)))
        mailbox.end(Finish("length"))

    front_end = binding.front_end = FrontEnd(produce)
    await front_end.models.prepare(front_end.model)
    posted = asyncio.create_task(front_end.post(stream=stream, nvext=CONTROL))
    await quiesce()
    binding.end()
    binding.begin()
    await quiesce()
    assert not posted.done()
    binding.end()
    async with asyncio.timeout(5):
        await posted
    assert b'"finish_reason":"length"' in front_end.body


async def test_a_fault_does_not_wait_for_a_binding() -> None:
    binding = Binding()

    async def produce(_: Submit, mailbox: Mailbox) -> None:
        binding.begin()
        mailbox.put(Delta(0, (WATER,)))
        raise GenerationFault(LOST)

    front_end = binding.front_end = FrontEnd(produce)
    await front_end.models.prepare(front_end.model)
    async with asyncio.timeout(5):
        await front_end.post(stream=True, nvext=CONTROL)
    assert front_end.events[-1]["error"]["code"] == "worker_lost"
    binding.end()
    await quiesce()
