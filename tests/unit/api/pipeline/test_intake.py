"""Before admission nothing is expensive: limits are checked in the order size, key, rate, shape, tokens, on every route with a body."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from typing import Any

import pytest
from msgspec import structs

from front_end import MODEL, FrontEnd, Produce, request, says
from penstock.api.app import ROUTES
from penstock.api.auth import gate
from penstock.api.auth.gate import Gate
from penstock.api.auth.keys import Keyring
from penstock.api.auth.quota import Quota
from penstock.api.openai.chat import parse_chat
from penstock.api.openai.completions import parse_completion
from penstock.api.pipeline import admission
from penstock.api.pipeline import request as pipeline
from penstock.config.front_end import KeySettings, Limits, QuotaLimits, read_key
from penstock.fairness import Share
from penstock.stream.mailbox import Mailbox
from penstock.wire.errors import RequestError
from penstock.wire.messages import Delta, Submit

KEY = "psk-test"
BEARER = {"authorization": f"Bearer {KEY}"}
WITH_BODY = [re.sub(r"{.*?}", "x", route.path) for route in ROUTES if route.body is not None]
GENERATING = ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"]
TOO_LARGE = {"content-length": str(Limits().max_body_bytes + 1)}
NO_JSON = b"this is not JSON"
ONE_TOOL = [{"type": "function", "function": {"name": "t"}}]
NAMED = {"type": "function", "function": {"name": "y" * 100_000}}


def limited(**limits: int) -> tuple[FrontEnd, Quota]:
    """A front end that knows one key, and what that may use."""
    front_end = FrontEnd(says("x"))
    keyring = Keyring(KeySettings(given=(read_key(KEY),), defaults=QuotaLimits(**limits)), front_end.tally)
    front_end.app = Gate(front_end.application, keyring, front_end.tally)
    tenant = keyring.tenant_of(KEY.encode())
    assert tenant is not None
    return front_end, tenant.quota


def test_the_table_has_the_routes_that_decode_and_tokenize() -> None:
    assert {*GENERATING, "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"} <= set(WITH_BODY)


@pytest.mark.parametrize("path", WITH_BODY)
async def test_the_order_of_limits(path: str) -> None:
    front_end, _ = limited(requests_per_minute=1)
    await front_end.send("POST", path, NO_JSON, TOO_LARGE)
    assert front_end.status == 413, "size before key"
    await front_end.send("POST", path, NO_JSON, {**TOO_LARGE, **BEARER})
    assert front_end.status == 413
    await front_end.send("POST", path, NO_JSON)
    assert front_end.status == 401, "key before rate"
    await front_end.send("POST", path, NO_JSON, BEARER)
    assert front_end.status not in (401, 413, 429), "nothing of the above has cost a request"
    await front_end.send("POST", path, NO_JSON, BEARER)
    assert front_end.status == 429, "rate before what is in the body"
    assert front_end.tally.limits_reached == {("max_body_bytes",): 2, ("requests_per_minute",): 1}
    assert front_end.tally.quota_refusals == {("api-key-1", "requests_per_minute"): 1}


@pytest.mark.parametrize("path", GENERATING)
async def test_a_body_is_not_decoded_when_no_generation_may_run_or_no_token_is_left(path: str) -> None:
    front_end, quota = limited(concurrency=1, tokens_per_minute=10)
    quota.admit(1, 10)
    await front_end.send("POST", path, NO_JSON, BEARER)
    assert (front_end.status, "tokens_per_minute" in front_end.body.decode()) == (429, True)
    front_end, quota = limited(concurrency=1)
    quota.admit(1, 10)
    await front_end.send("POST", path, NO_JSON, BEARER)
    assert (front_end.status, "concurrency" in front_end.body.decode()) == (429, True)
    await front_end.send("POST", "/tokenize", NO_JSON, BEARER)
    assert front_end.status == 400, "it needs no generation"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": [""] * 2049}, "prompt", "`prompt` has 2,049 prompts: expected at most 2,048"),
        ({"prompt": [[]] * 2049}, "prompt", "`prompt` has 2,049 prompts: expected at most 2,048"),
        ({"prompt": [""] * 100, "n": 128}, "n", "100 prompts × `n` 128 make more than 2048 choices"),
        ({"prompt": [""] * 100, "best_of": 128}, "n", "100 prompts × `n` 128 make more than 2048 choices"),
        ({"prompt": [-1] * 1000}, "prompt", "maximum context length is 1000 tokens. However, your prompt resulted in 1000 tokens"),
        ({"prompt": [[1], [-1] * 1000]}, "prompt[1]", "your prompt resulted in 1000 tokens"),
        ({"prompt": "", "max_tokens": 0}, "max_tokens", "`max_tokens` is 0"),
    ],
)
async def test_the_shape_is_checked_before_anything_is_tokenized(fields: dict[str, object], param: str, says: str) -> None:
    """Each of these has a prompt that is wrong, too, which is found when it is tokenized or looked at."""
    incoming, context = await request({"model": "m", **fields})
    with pytest.raises(RequestError) as caught:
        await parse_completion(incoming, context)
    assert caught.value.param == param
    assert says in caught.value.message


async def test_a_text_is_tokenized_only_until_it_cannot_fit() -> None:
    incoming, context = await request({"model": "m", "prompt": "ß" * 6_000})
    with pytest.raises(RequestError) as caught:
        await parse_completion(incoming, context)
    found = re.search(r"your prompt resulted in at least ([0-9]+) tokens", caught.value.message)
    assert found is not None
    assert 1_000 < int(found[1]) < 12_000, "it would have 12,000"
    assert (caught.value.code, caught.value.limit) == ("context_length_exceeded", "context_length")


async def test_all_prompts_together_have_a_limit() -> None:
    model = structs.replace(MODEL, context_length=2**20)
    incoming, context = await request({"model": "m", "prompt": ["ß" * 300_000] * 3}, model)
    with pytest.raises(RequestError) as caught:
        await parse_completion(incoming, context)
    assert (caught.value.param, caught.value.limit) == ("prompt", "prompt_tokens")
    assert "`prompt` has more than 1,048,576 tokens in all its prompts" in caught.value.message


async def test_a_chat_that_is_too_long_is_refused_before_its_tokens_are_unpacked() -> None:
    messages = [{"role": "user", "content": "ß" * 3_000}]
    session = {"session_control": {"session_id": "s", "action": "open"}}
    incoming, context = await request({"model": "m", "messages": messages, "nvext": session})
    with pytest.raises(RequestError) as caught:
        await parse_chat(incoming, context)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    assert re.search(r"your messages resulted in 60[0-9][0-9] tokens", caught.value.message)
    assert context.transcripts.tokens_encoded == 0, "what is refused is not remembered"


USER = {"role": "user", "content": "x"}
CHAT = {"model": "m", "messages": [USER]}
MESSAGES = {**CHAT, "max_tokens": 5}
RESPONSE = {"model": "m", "input": "x"}
NODES: dict[str, Any] = {"enum": [[]] * 8_200}
TOOL = {"type": "function", "name": "f", "parameters": NODES}


@pytest.mark.parametrize(
    ("path", "fields", "param", "says", "limit"),
    [
        ("/v1/completions", {"model": "m", "prompt": [""] * 2049}, "prompt", "has 2,049 prompts: expected at most 2,048", "prompt"),
        ("/v1/completions", {"model": "m", "prompt": "x", "stop": ["x"] * 17}, "stop", "has 17 elements: expected at most 16", "stop"),
        ("/v1/completions", {"model": "m", "prompt": "x", "stop": "x" * 4097}, "stop", "4,097 characters: expected at most 4,096", "stop"),
        ("/v1/chat/completions", {**CHAT, "messages": [USER] * 16_385}, "messages", "has 16,385 elements", "messages"),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}] * 1025}, "tools", "1,025", "tools"),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 16_385}]},
            "messages[0].content",
            "has 16,385 elements: expected at most 16,384",
            "messages.content",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "tools": [{"type": "function", "function": {"name": name, "parameters": NODES}} for name in "ab"]},
            "tools",
            "`tools` has more than 16,384 objects and lists",
            "schema_nodes",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"allOf": [NODES, NODES]}}}},
            "response_format.json_schema.schema",
            "has more than 16,384 objects and lists",
            "schema_nodes",
        ),
        ("/v1/messages", {**MESSAGES, "stop_sequences": ["x"] * 17}, None, "`stop_sequences` has 17 elements", "stop_sequences"),
        (
            "/v1/messages",
            {**MESSAGES, "tools": [{"name": n, "input_schema": NODES} for n in "ab"]},
            None,
            "`tools` has more",
            "schema_nodes",
        ),
        ("/v1/responses", {**RESPONSE, "tools": [{**TOOL, "name": name} for name in "ab"]}, "tools", "`tools` has more", "schema_nodes"),
        ("/v1/responses", {"model": "m", "input": [USER] * 16_385}, "input", "has 16,385 elements: expected at most 16,384", "input"),
        ("/tokenize", {"messages": [USER] * 16_385}, "messages", "has 16,385 elements", "messages"),
    ],
)
async def test_the_shape_has_limits_that_are_named(path: str, fields: dict[str, object], param: str | None, says: str, limit: str) -> None:
    front_end, _ = limited()
    await front_end.send("POST", path, json.dumps(fields, separators=(",", ":")).encode(), BEARER)
    error = front_end.json["error"]
    assert (front_end.status, error.get("param")) == (400, param)
    assert says in error["message"]
    assert front_end.tally.limits_reached == {(limit,): 1}


async def test_a_refused_body_is_taken_from_the_client_and_dropped() -> None:
    front_end, quota = limited(requests_per_minute=1)
    quota.charge()
    left = 3
    sent = []

    async def receive() -> object:
        nonlocal left
        left -= 1
        return {"type": "http.request", "body": b"x" * 1000, "more_body": left > 0}

    async def send(message: object) -> None:
        sent.append((left, message))

    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "headers": headers}
    await front_end.app(scope, receive, send)  # type: ignore[arg-type]
    assert [remaining for remaining, _ in sent] == [0, 0], "some clients read no answer before they have sent everything"


# The budget of body bytes.

ALICE, BOB = "psk-alice", "psk-bob"
BODY = json.dumps({"model": "m", "prompt": "x", "user": "x" * 560}).encode()
ROOM = len(BODY) + len(BODY) // 2
HALF = len(BODY) // 2


class Client:
    """A request whose body is sent piece by piece."""

    def __init__(self, front_end: FrontEnd, key: str, body: bytes = BODY, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self._pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[Any] = []
        length = () if (b"transfer-encoding", b"chunked") in headers else ((b"content-length", str(len(body)).encode()),)
        headers = ((b"x-api-key", key.encode()), *length, *headers)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
        self.task = asyncio.ensure_future(front_end.app(scope, self._pieces.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def send(self, body: bytes) -> None:
        self._pieces.put_nowait({"type": "http.request", "body": body, "more_body": True})
        await settled()

    def disconnect(self) -> None:
        self._pieces.put_nowait({"type": "http.disconnect"})

    async def answer(self) -> tuple[int, bytes]:
        async with asyncio.timeout(10):
            await self.task
        return self.sent[0]["status"], b"".join(message["body"] for message in self.sent[1:])


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def with_little_room(produce: Produce | None = None, seconds: float = 60.0) -> FrontEnd:
    """Two keys, and room for one and a half bodies, which must come within some seconds."""
    front_end = FrontEnd(produce or says("x"), Limits(body_memory=ROOM, stall_seconds=seconds))
    await front_end.models.prepare(front_end.model)
    keyring = Keyring(KeySettings(given=(read_key(ALICE), read_key(BOB))), front_end.tally)
    front_end.app = Gate(front_end.application, keyring, front_end.tally)
    return front_end


async def test_a_slow_body_holds_what_it_has_announced_and_a_second_tenant_goes_on() -> None:
    front_end = await with_little_room()
    bodies = front_end.admission.bodies
    slow = Client(front_end, ALICE)
    await slow.send(BODY[:HALF])
    assert bodies.used == len(BODY)
    others = [Client(front_end, ALICE) for _ in range(3)]
    for client in others:
        await client.send(BODY[:-1])
    assert bodies.waiting == 3
    for _ in range(3):
        second = Client(front_end, BOB)
        await second.send(BODY)
        assert (await second.answer())[0] == 200, "however much the first tenant holds"
    for client in others:
        await client.send(BODY[-1:])
    await slow.send(BODY[HALF:])
    for client in (slow, *others):
        assert (await client.answer())[0] == 200
    assert (bodies.used, bodies.waiting) == (0, 0)
    bodies.check_integrity()


async def test_a_body_that_waits_too_long_is_told_which_limit_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAX_BODY_WAIT_SECONDS", 0.01)
    front_end = await with_little_room()
    slow, second = Client(front_end, ALICE), Client(front_end, ALICE)
    await slow.send(BODY[:-1])
    await second.send(BODY)
    second.disconnect()
    status, body = await second.answer()
    assert (status, f"its limit is {ROOM:,} (--body-memory)" in body.decode()) == (503, True)
    assert dict(second.sent[0]["headers"])[b"retry-after"] == b"1"
    assert front_end.tally.limits_reached == {("body_memory",): 1}
    await slow.send(BODY[-1:])
    assert (await slow.answer())[0] == 200
    assert front_end.admission.bodies.used == 0


async def test_a_decoded_body_without_room_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has sent everything, so there is nothing more to wait for."""
    monkeypatch.setattr(pipeline, "MAX_BODY_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(gate, "DISCARD_SECONDS", 60.0)
    front_end = await with_little_room()
    slow = Client(front_end, ALICE)
    await slow.send(BODY[:-1])
    compressed = gzip.compress(BODY)
    second = Client(front_end, ALICE, compressed, ((b"content-encoding", b"gzip"),))
    await second.send(compressed)
    assert (await second.answer())[0] == 503
    assert front_end.admission.bodies.used == len(BODY), "only the first one holds room"
    await slow.send(BODY[-1:])
    assert (await slow.answer())[0] == 200
    assert front_end.admission.bodies.used == 0


async def test_without_a_body_there_is_nothing_to_decode() -> None:
    """Some clients have the header in all their requests."""
    front_end = FrontEnd(says("x"))
    await front_end.send("GET", "/v1/models", headers={"content-encoding": "gzip"})
    assert front_end.status == 200


async def test_a_refused_body_holds_no_room_while_the_rest_of_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAX_BODY_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(gate, "DISCARD_SECONDS", 60.0)
    front_end = await with_little_room()
    bodies, holder, waiting = front_end.admission.bodies, Share("api-key-1"), Share("api-key-1")
    assert bodies.take(holder, HALF)
    # Without a length it takes room as it comes.
    client = Client(front_end, ALICE, headers=((b"transfer-encoding", b"chunked"),))
    await client.send(BODY)
    await client.send(BODY)
    async with asyncio.timeout(10):
        await bodies.wait(waiting, ROOM - HALF)
    assert not client.sent, "some clients read no answer before they have sent everything"
    client.disconnect()
    assert (await client.answer())[0] == 503
    for share in (holder, waiting):
        bodies.release(share)
    assert bodies.used == 0


async def test_a_body_that_waits_for_room_until_its_time_is_over_is_not_called_slow() -> None:
    front_end = await with_little_room(seconds=0.02)
    holder = Share("api-key-1")
    assert front_end.admission.bodies.take(holder, ROOM)
    client = Client(front_end, ALICE)
    await client.send(BODY)
    client.disconnect()
    assert (await client.answer())[0] == 503
    front_end.admission.bodies.release(holder)
    client = Client(front_end, ALICE)
    await client.send(BODY[:-1])
    assert (await client.answer())[0] == 408, "the client is"
    assert front_end.admission.bodies.used == 0


async def test_a_client_that_leaves_while_it_waits_passes_its_room_on() -> None:
    front_end = await with_little_room()
    bodies = front_end.admission.bodies
    first, gone, cancelled, last = (Client(front_end, ALICE) for _ in range(4))
    for client in (first, gone, cancelled, last):
        await client.send(BODY[:-1])
    assert bodies.waiting == 3
    gone.disconnect()
    cancelled.task.cancel()
    await settled()
    assert bodies.waiting == 2
    await last.send(BODY[-1:])
    await first.send(BODY[-1:])
    assert [(await client.answer())[0] for client in (first, gone, last)] == [200, 400, 200]
    assert cancelled.task.cancelled()
    assert (bodies.used, bodies.waiting) == (0, 0)


async def test_an_answer_does_not_hold_the_body_of_its_request() -> None:
    async def never_ends(_: Submit, mailbox: Mailbox) -> None:
        mailbox.put(Delta(0, tuple(b"abc")))
        await asyncio.Event().wait()

    front_end = await with_little_room(never_ends)
    clients = [Client(front_end, ALICE) for _ in range(5)]
    for client in clients:
        await client.send(BODY)
    assert front_end.admission.bodies.used == 0
    assert front_end.tally.running == 5
    for client in clients:
        client.disconnect()
    await asyncio.gather(*(client.task for client in clients))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "y" * 100_000: 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": ONE_TOOL, "tool_choice": NAMED}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "y" * 100_000: 1}),
    ],
)
async def test_an_error_does_not_quote_all_that_is_wrong(path: str, fields: dict[str, Any]) -> None:
    front_end = FrontEnd(says("x"))
    await front_end.send("POST", path, json.dumps({"model": "m", **fields}).encode())
    assert front_end.status == 400
    assert b"yyy" in front_end.body
    assert len(front_end.body) < 5000


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/v1/responses/x/input_items"])
async def test_a_long_query_is_not_read(path: str) -> None:
    front_end, _ = limited(requests_per_minute=1)
    method = "POST" if path == "/v1/completions" else "GET"
    await front_end.send(method, f"{path}?{'a&' * pipeline.MAX_QUERY_BYTES}", NO_JSON, BEARER)
    assert front_end.status == 414
    if method == "POST":
        await front_end.send(method, f"{path}?{'a&' * pipeline.MAX_QUERY_BYTES}", NO_JSON, BEARER)
        assert front_end.status == 429, "it has cost a request"


async def test_answers_that_repeat_long_prompts_with_logprobs_wait_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one at a time fits. Another key goes on."""

    async def never_ends(_: Submit, mailbox: Mailbox) -> None:
        mailbox.put(Delta(0, tuple(b"abc")))
        await asyncio.Event().wait()

    front_end = FrontEnd(never_ends, Limits(answer_memory=3000))
    await front_end.models.prepare(front_end.model)
    keyring = Keyring(KeySettings(given=(read_key(ALICE), read_key(BOB))), front_end.tally)
    front_end.app = Gate(front_end.application, keyring, front_end.tally)
    body = json.dumps({"model": "m", "prompt": "word " * 2, "echo": True, "logprobs": 1, "stream": True}).encode()
    clients = [Client(front_end, key, body) for key in (ALICE, ALICE, BOB)]
    for client in clients:
        await client.send(body)
    answers = front_end.admission.answers
    assert (answers.waiting, front_end.tally.running) == (1, 2)
    clients[0].disconnect()
    await clients[0].task
    await settled()
    assert (answers.waiting, front_end.tally.running) == (0, 2)
    monkeypatch.setattr(admission, "MAX_WAIT_SECONDS", 0.01)
    late = Client(front_end, BOB, body)
    await late.send(body)
    status, text = await late.answer()
    assert (status, "--answer-memory" in text.decode()) == (503, True)
    for client in clients[1:]:
        client.disconnect()
        await client.task
    assert answers.used == 0
    answers.check_integrity()


async def test_prompts_that_wait_for_the_memory_of_their_answers_are_bounded() -> None:
    """They take room as bodies do, by what they take when they are tokenized."""

    async def never_ends(_: Submit, mailbox: Mailbox) -> None:
        mailbox.put(Delta(0, tuple(b"abc")))
        await asyncio.Event().wait()

    body = json.dumps({"model": "m", "prompt": [65] * 50, "echo": True, "logprobs": 1, "stream": True}).encode()
    front_end = FrontEnd(never_ends, Limits(answer_memory=10_000, body_memory=5 * 50 * admission.TOKEN_BYTES))
    await front_end.models.prepare(front_end.model)
    clients = [Client(front_end, "", body) for _ in range(10)]
    for client in clients:
        await client.send(body)
    await settled()
    answers, bodies = front_end.admission.answers, front_end.admission.bodies
    refused = [client for client in clients if client.task.done()]
    assert (answers.waiting, len(refused)) == (5, 4)
    assert bodies.used == 5 * 50 * admission.TOKEN_BYTES
    status, text = await refused[0].answer()
    assert (status, "--answer-memory" in text.decode()) == (503, True)
    for client in clients:
        client.disconnect()
        await client.task
    assert (answers.used, bodies.used) == (0, 0)
    bodies.check_integrity()


async def test_one_answer_that_takes_many_times_the_memory_is_refused() -> None:
    front_end = FrontEnd(says("x"), Limits(answer_memory=100_000))
    fields: dict[str, Any] = {"prompt": "word " * 100, "echo": True, "logprobs": 5}
    await front_end.post(**fields)
    assert front_end.status == 200
    await front_end.post(**fields, n=128)
    assert (front_end.status, front_end.json["error"]["param"]) == (400, "n")
    assert front_end.tally.limits_reached["answer_memory",] == 1
    assert front_end.admission.answers.used == 0
