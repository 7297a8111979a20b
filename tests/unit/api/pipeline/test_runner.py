"""What a request costs its key, and that everything is given back, however it ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from front_end import FrontEnd, Produce, request, says
from penstock.api.anthropic.messages import count_message_tokens, parse_messages
from penstock.api.auth.gate import Gate
from penstock.api.auth.keys import Keyring
from penstock.api.auth.quota import Quota
from penstock.api.openai.chat import parse_chat
from penstock.api.openai.completions import CompletionDialect
from penstock.api.pipeline.request import PromptContext
from penstock.api.pipeline.response import MAX_PIECE_BYTES
from penstock.api.responses.store import SqliteStore
from penstock.config.front_end import KeySettings, Limits, QuotaLimits, read_key
from penstock.metrics.frontend import Tally
from penstock.stream.mailbox import Mailbox
from penstock.text.transcript import Transcripts
from penstock.wire.errors import GenerationFault
from penstock.wire.messages import Delta, Fault, Finish, Mark, PromptReport, Submit

KEY = "psk-test"


def limited(produce: Produce, **limits: int) -> tuple[FrontEnd, Quota]:
    """A front end that knows one key, and what that may use."""
    front_end = FrontEnd(produce)
    keyring = Keyring(KeySettings(given=tuple(map(read_key, [KEY])), defaults=QuotaLimits(**limits)), front_end.tally)
    front_end.app = Gate(front_end.application, keyring, front_end.tally)
    tenant = keyring.tenant_of(KEY.encode())
    assert tenant is not None
    return front_end, tenant.quota


async def complete(front_end: FrontEnd, **fields: Any) -> None:
    body = json.dumps({"model": "m", "prompt": "hi", **fields}).encode()
    await front_end.send("POST", "/v1/completions", body, {"authorization": f"Bearer {KEY}"})


async def never_ends(_: Submit, mailbox: Mailbox) -> None:
    mailbox.put(Delta(0, tuple(b"abc")))
    await asyncio.Event().wait()


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"stream": True, "stream_options": {"resumable": True}}])
async def test_the_tokens_of_prompt_and_answer_are_booked(fields: dict[str, Any]) -> None:
    front_end, quota = limited(says("hel", "lo"), tokens_per_minute=1000)
    await complete(front_end, n=2, **fields)
    assert front_end.status == 200
    assert front_end.tally.key_tokens["api-key-1", "prompt"] == 2
    assert front_end.tally.key_tokens["api-key-1", "completion"] == 10
    remaining = dict(quota.headers())[b"x-ratelimit-remaining-tokens"]
    assert remaining == b"988"
    await front_end.detached.close()


async def test_tokens_that_came_before_the_client_left_are_booked() -> None:
    front_end, quota = limited(never_ends, tokens_per_minute=1000, concurrency=1)
    connection = asyncio.create_task(complete(front_end, stream=True))
    async with asyncio.timeout(10):
        while len(front_end.sent) < 2:
            await asyncio.sleep(0)
    front_end.gone.set()
    await connection
    assert front_end.tally.key_tokens["api-key-1", "completion"] == 3
    assert quota.running == 0


async def test_every_generation_counts_against_the_concurrency() -> None:
    front_end, quota = limited(never_ends, concurrency=3)
    connection = asyncio.create_task(complete(front_end, stream=True, n=2))
    async with asyncio.timeout(10):
        while quota.running < 2:
            await asyncio.sleep(0)
    sent = front_end.sent
    await complete(front_end, n=2)
    assert front_end.status == 429
    assert quota.running == 2
    front_end.sent = sent
    front_end.gone.set()
    await connection
    assert quota.running == 0


async def test_a_whole_answer_keeps_its_place_until_it_is_taken() -> None:
    front_end, quota = limited(says("x" * 100_000), concurrency=1)
    front_end.socket_open.clear()
    connection = asyncio.create_task(complete(front_end))
    async with asyncio.timeout(10):
        while not front_end.sent:
            await asyncio.sleep(0)
    assert (quota.running, front_end.tally.running) == (1, 1)
    assert not front_end.admission.idle.is_set()
    front_end.socket_open.set()
    await connection
    assert front_end.json["choices"][0]["text"] == "x" * 100_000
    assert max(len(message.get("body", b"")) for message in front_end.sent) == MAX_PIECE_BYTES
    assert front_end.tally.requests["completions", "ok"] == 1
    assert (quota.running, front_end.tally.running) == (0, 0)
    assert front_end.admission.idle.is_set()


async def test_a_client_that_leaves_in_the_middle_of_a_whole_answer_has_left() -> None:
    front_end, quota = limited(says("x" * 100_000), concurrency=1)
    front_end.socket_open.clear()
    connection = asyncio.create_task(complete(front_end))
    async with asyncio.timeout(10):
        while not front_end.sent:
            await asyncio.sleep(0)
    front_end.gone.set()
    await asyncio.sleep(0)
    # The server forgets the rest: a send to nobody returns.
    front_end.socket_open.set()
    await connection
    assert front_end.tally.requests["completions", "client_left"] == 1
    assert front_end.tally.clients_left == 1
    assert len(front_end.body) == MAX_PIECE_BYTES
    assert quota.running == 0


async def test_answers_that_nobody_takes_have_a_limit(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(says("x"), limits=Limits(answer_memory=150_000), responses=store)
        items = [{"type": "message", "role": "user", "content": "x" * 100_000}]
        await front_end.send("POST", "/v1/conversations", json.dumps({"items": items}).encode())
        path = f"/v1/conversations/{front_end.json['id']}/items"
        front_end.socket_open.clear()
        first = asyncio.create_task(front_end.send("GET", path))
        async with asyncio.timeout(10):
            while not front_end.admission.answers.used:
                await asyncio.sleep(0)
        second = asyncio.create_task(front_end.send("GET", path))
        async with asyncio.timeout(10):
            while not front_end.sent or front_end.sent[0]["status"] != 503:
                await asyncio.sleep(0)
        front_end.socket_open.set()
        await asyncio.gather(first, second)
        outcomes = {outcome: count for (route, outcome), count in front_end.tally.requests.items() if route == "conversation_items"}
        assert outcomes == {"ok": 1, "refused_503": 1}
        assert front_end.tally.limits_reached["answer_memory",] == 1
        assert front_end.admission.answers.used == 0
        await front_end.send("GET", path)
        assert front_end.status == 200


async def test_a_fault_gives_everything_back() -> None:
    async def produce(_: Submit, mailbox: Mailbox) -> None:
        raise GenerationFault(Fault("worker_lost", "gone"))

    front_end, quota = limited(produce, concurrency=1)
    for _ in range(2):
        await complete(front_end)
        assert front_end.status == 503
        assert quota.running == 0
        assert front_end.admission.idle.is_set()


async def test_an_error_before_the_first_generation_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    front_end, quota = limited(says("x"), concurrency=1)

    def opening(*_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(CompletionDialect, "opening", opening)
    with pytest.raises(ZeroDivisionError):
        await complete(front_end)
    assert (front_end.status, quota.running) == (500, 0)
    assert front_end.admission.idle.is_set()


async def test_a_session_s_turn_ends_with_its_request() -> None:
    front_end, _ = limited(says("x"))
    await complete(front_end, nvext={"session_control": {"session_id": "s", "action": "open"}})
    assert front_end.status == 200
    assert front_end.turn.session is not None
    assert front_end.turn.session.active == 0
    async with asyncio.timeout(10):
        while len(asyncio.all_tasks()) > 1:
            # The session is bound to no worker, and is closed.
            await asyncio.sleep(0)


async def test_generations_that_are_over_make_room() -> None:
    front_end = FrontEnd(says("x"), limits=Limits(max_generations=2))
    for _ in range(3):
        await front_end.post(n=2)
        assert front_end.status == 200
    await front_end.post(n=3)
    assert front_end.status == 429


async def test_what_a_stop_string_has_ended_is_not_generated_on() -> None:
    stopped, may_end = asyncio.Event(), asyncio.Event()
    begun = 0

    async def produce(_: Submit, mailbox: Mailbox) -> None:
        nonlocal begun
        begun += 1
        is_first = begun == 1
        mailbox.put(Delta(0, tuple(b"a." if is_first else b"a")))
        try:
            await may_end.wait()
        except asyncio.CancelledError:
            stopped.set()
            raise
        mailbox.end(Finish("stop"))

    front_end = FrontEnd(produce)
    connection = asyncio.create_task(front_end.post(n=2, stop=".", stream=True))
    async with asyncio.timeout(10):
        await stopped.wait()
        may_end.set()
        await connection
    assert {event["choices"][0]["index"] for event in front_end.events if event["choices"][0]["finish_reason"]} == {0, 1}


async def test_the_cached_part_of_a_prompt_is_counted_once() -> None:
    async def produce(_: Submit, mailbox: Mailbox) -> None:
        mailbox.put(Delta(0, tuple(b"ab"), prompt=PromptReport(4, retained=(Mark(8, 60.0),), written=(2,))))
        mailbox.end(Finish("stop"))

    front_end = FrontEnd(produce)
    await front_end.post(prompt=["12345678", "12345678"], n=3)
    usage = front_end.json["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (16, 12)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 8, "cache_write_tokens": 4}
    options = {"include_usage": True, "continuous_usage_stats": True}
    await front_end.post(prompt=["12345678", "12345678"], n=3, stream=True, stream_options=options)
    assert front_end.events[-1]["usage"] == usage
    assert front_end.events[-2]["usage"]["completion_tokens"] == 12


async def test_a_client_that_leaves_while_its_socket_is_full() -> None:
    front_end = FrontEnd(never_ends)
    front_end.socket_open.clear()
    connection = asyncio.create_task(front_end.post(stream=True))
    async with asyncio.timeout(10):
        while front_end.tally.writes == 0:
            await asyncio.sleep(0)
        front_end.gone.set()
        await connection
    assert front_end.tally.clients_left == 1
    assert front_end.admission.idle.is_set()


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"nvext": {"session_control": {"session_id": "s", "action": "open"}}}])
@pytest.mark.parametrize("is_early", [False, True])
async def test_a_client_that_leaves_before_the_first_token(fields: dict[str, Any], is_early: bool) -> None:
    """As early as before its generation has begun, or while its prompt is computed."""
    begun, stopped = asyncio.Event(), asyncio.Event()

    async def silent(_: Submit, __: Mailbox) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    front_end, quota = limited(silent, concurrency=1)
    if is_early:
        front_end.gone.set()
    connection = asyncio.create_task(complete(front_end, **fields))
    async with asyncio.timeout(10):
        await begun.wait()
        front_end.gone.set()
        await connection
        await stopped.wait()
    assert front_end.tally.clients_left == 1
    assert front_end.tally.requests["completions", "client_left"] == 1
    assert (quota.running, front_end.tally.queued, front_end.tally.running) == (0, 0, 0)
    assert front_end.admission.idle.is_set()


async def test_sessions_of_one_name_are_remembered_apart_for_every_key() -> None:
    """What one key has said, another neither reads nor overwrites."""
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    incoming, made = await request(body)
    keyring = Keyring(KeySettings(), Tally())

    for parse in (parse_chat, parse_messages, count_message_tokens):
        library = PromptContext(made.models, Transcripts(2**20))
        for count, key in enumerate((b"ann", b"bob"), 1):
            tenant = keyring.tenant_of(key)
            assert tenant is not None
            asked = structs.replace(incoming, headers=[(b"x-session-id", b"s")], tenant=tenant)
            await parse(asked, library)
            assert len(library.transcripts) == (0 if parse is count_message_tokens else count), "counting leaves a session as it is"


async def test_no_key_holds_all_generations_while_another_waits() -> None:
    front_end = FrontEnd(never_ends, limits=Limits(max_generations=8))
    keyring = Keyring(KeySettings(given=tuple(map(read_key, ["psk-flood", "psk-other"]))), front_end.tally)
    front_end.app = Gate(front_end.application, keyring, front_end.tally)
    running: list[asyncio.Task[None]] = []

    async def status(key: str) -> int:
        """Of a stream that goes on, or of its refusal."""
        body = json.dumps({"model": "m", "prompt": "hi", "stream": True}).encode()
        before = front_end.sent
        task = asyncio.create_task(front_end.send("POST", "/v1/completions", body, {"authorization": f"Bearer {key}"}))
        async with asyncio.timeout(10):
            while front_end.sent is before or not front_end.sent:
                await asyncio.sleep(0)
        if front_end.status == 200:
            running.append(task)
        else:
            await task
        return front_end.status

    assert [await status("psk-flood") for _ in range(9)] == [200] * 7 + [429] * 2
    assert front_end.json["error"]["message"].endswith("The free places are for keys below their share; your key has 7 generations")
    assert await status("psk-other") == 200
    assert await status("psk-other") == 429
    front_end.gone.set()
    await asyncio.wait(running)
    assert front_end.tally.running == 0


@pytest.mark.parametrize(("claimed", "sent"), [(9, 2), (2, 2), (-3, -3), (None, 0)])
async def test_a_key_bounds_the_priority_that_its_clients_claim(claimed: int | None, sent: int) -> None:
    seen: list[Submit] = []

    async def produce(request: Submit, mailbox: Mailbox) -> None:
        seen.append(request)
        mailbox.end(Finish("stop"))

    front_end, _ = limited(produce, max_priority=2)
    await complete(front_end, **({} if claimed is None else {"nvext": {"agent_hints": {"priority": claimed}}}))
    assert [request.priority for request in seen] == [sent]
