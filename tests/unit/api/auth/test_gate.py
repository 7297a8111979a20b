"""Who may come in, and which web pages may ask."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from penstock.api.auth import gate
from penstock.api.auth.gate import OPEN_PATHS, TENANT, Gate
from penstock.api.auth.keys import NOBODY, Headers, Keyring, owner_of, presented_key
from penstock.config.front_end import KeySettings, check_host, check_origin, read_key
from penstock.metrics.frontend import ClusterReading, FrontEndMetrics, Tally

KEY = "psk-the-right-one"
BEARER = {"authorization": f"Bearer {KEY}"}
PAGE = "https://chat.example.org"
PREFLIGHT = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
STREAM_HEADERS = [(b"content-type", b"text/event-stream")]


def owner(headers: Headers) -> str:
    return owner_of(presented_key(headers))


class Answer:
    def __init__(self, messages: list[Message]) -> None:
        start, *bodies = messages
        assert start["type"] == "http.response.start"
        self.status: int = start["status"]
        self.pairs = [(name.decode(), value.decode()) for name, value in start["headers"]]
        self.headers = dict(self.pairs)
        self.bodies = [body["body"] for body in bodies]
        assert [body.get("more_body", False) for body in bodies] == [True] * (len(bodies) - 1) + [False]

    @property
    def json(self) -> Any:
        (body,) = self.bodies
        assert self.headers["content-length"] == str(len(body))
        return json.loads(body)


class Front:
    """A gate before an application that streams, and remembers whom it has seen."""

    def __init__(self, *keys: str, cors: Iterable[str] = (), hosts: Iterable[str] | None = None, metrics_key: str | None = None) -> None:
        self.tally = Tally()
        self.seen: list[Any] = []
        self.received = 0
        self.body_megabytes = 1
        keyring = Keyring(KeySettings(tuple(map(read_key, keys))), self.tally)
        known = None if metrics_key is None else read_key(metrics_key)
        self._gate = Gate(self._app, keyring, self.tally, cors, hosts=hosts, metrics_key=known)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.seen.append(scope[TENANT])
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        await send({"type": "http.response.body", "body": b"two", "more_body": False})

    async def ask(self, headers: dict[str, str] | None = None, path: str = "/v1/models", method: str = "GET") -> Answer:
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        async def receive() -> Message:
            self.received += 1
            return {"type": "http.request", "body": b"x" * 1_000_000, "more_body": self.received < self.body_megabytes}

        pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        await self._gate({"type": "http", "method": method, "path": path, "headers": pairs}, receive, send)
        return Answer(sent)


@pytest.mark.parametrize("headers", [BEARER, {"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY}])
async def test_a_known_key_comes_in_however_it_is_sent(headers: dict[str, str]) -> None:
    front = Front("another", KEY)
    answer = await front.ask(headers)
    assert (answer.status, answer.bodies) == (200, [b"one", b"two"])
    (tenant,) = front.seen
    assert tenant.name == "api-key-2"
    assert tenant.owner == owner([(name.encode(), value.encode()) for name, value in headers.items()])
    assert not front.tally.failed_authentications


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({}, "missing"),
        ({"authorization": "Bearer "}, "missing"),
        ({"x-api-key": ""}, "missing"),
        ({"authorization": "Bearer psk-wrong"}, "unknown"),
        ({"authorization": f"Basic {KEY}"}, "unknown"),
        ({"authorization": f"Bearer {KEY}x"}, "unknown"),
        ({"x-api-key": KEY[:-1]}, "unknown"),
        ({"authorization": "Bearer psk-wrong", "x-api-key": KEY}, "unknown"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages", "/", "/metrics/", "//metrics", "/v1/../metrics"])
async def test_without_a_known_key_nobody_comes_in(headers: dict[str, str], reason: str, path: str) -> None:
    front = Front(KEY)
    answer = await front.ask(headers, path, "POST")
    assert answer.status == 401
    assert not front.seen
    assert answer.headers["www-authenticate"] == "Bearer"
    assert front.tally.failed_authentications == {(reason,): 1}
    assert "psk-" not in json.dumps(answer.json)
    assert "psk-" not in str(answer.pairs)


@pytest.mark.parametrize(("megabytes", "received"), [(3, 3), (10**9, 9)])
async def test_a_body_is_taken_within_bounds_so_that_its_sender_reads_the_answer(megabytes: int, received: int) -> None:
    front = Front(KEY)
    front.body_megabytes = megabytes
    assert (await front.ask({}, method="POST")).status == 401
    assert front.received == received
    assert (await front.ask(BEARER)).status == 200
    assert front.received == received, "what is let in is the application's to read"


async def test_a_body_that_does_not_come_does_not_keep_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "DISCARD_SECONDS", 0.01)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    door = Gate(Front()._app, Keyring(KeySettings(tuple(map(read_key, [KEY]))), Tally()), Tally())
    await door({"type": "http", "method": "POST", "path": "/v1/models", "headers": []}, receive, send)
    assert Answer(sent).status == 401


async def test_the_shape_of_openai() -> None:
    answer = await Front(KEY).ask({"x-api-key": "psk-wrong"})
    assert answer.json == {
        "error": {
            "message": "the API key is unknown: send one as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_the_shape_of_anthropic(path: str) -> None:
    front = Front(KEY)
    answer = await front.ask({}, path, "POST")
    message = "an API key is needed: send one as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    assert answer.json == {
        "type": "error",
        "error": {"type": "authentication_error", "message": message},
        "request_id": answer.headers["request-id"],
    }
    assert answer.headers["x-request-id"] == answer.headers["request-id"]
    assert (await front.ask({}, path)).headers["request-id"] != answer.headers["request-id"]


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_probes_need_no_key(path: str) -> None:
    front = Front(KEY)
    assert (await front.ask({}, path)).status == 200
    assert front.seen[0].name == NOBODY


async def test_without_keys_everyone_comes_in() -> None:
    front = Front()
    assert (await front.ask()).status == 200
    assert (await front.ask(BEARER)).status == 200
    assert [tenant.owner for tenant in front.seen] == [NOBODY, owner([(b"x-api-key", KEY.encode())])]


async def test_failures_and_usage_are_metrics_without_secrets() -> None:
    front = Front(KEY)
    metrics = FrontEndMetrics(front.tally)
    metrics.observe(ClusterReading)
    await front.ask({"x-api-key": "psk-wrong"})
    await front.ask(BEARER)
    quota = front.seen[0].quota
    quota.admit(1, 5)
    quota.release(1, 5, 7)
    front.tally.quota_refusals["api-key-1", "concurrency"] += 1
    assert "api-key-1" not in metrics.render().decode(), "only who asks for keys sees them"
    text = metrics.render(with_keys=True).decode()
    assert 'penstock_failed_authentications_total{reason="unknown"} 1.0' in text
    assert 'penstock_key_requests_total{key="api-key-1"} 1.0' in text
    assert 'penstock_key_tokens_total{key="api-key-1",kind="prompt"} 5.0' in text
    assert 'penstock_key_tokens_total{key="api-key-1",kind="completion"} 7.0' in text
    assert 'penstock_quota_refusals_total{key="api-key-1",limit="concurrency"} 1.0' in text
    assert "psk-" not in text


# Web pages.


async def test_without_origins_there_is_no_cors() -> None:
    front = Front(KEY)
    answer = await front.ask({**BEARER, "origin": PAGE})
    assert answer.pairs == [("content-type", "text/event-stream")]
    answer = await front.ask(PREFLIGHT, "/v1/chat/completions", "OPTIONS")
    assert (answer.status, answer.json["error"]["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, HEAD, POST, DELETE"
    assert not [name for name in answer.headers if name.startswith("access-control") or name == "vary"]
    assert not front.tally.failed_authentications


@pytest.mark.parametrize(("cors", "allowed"), [([PAGE], PAGE), (["*"], "*"), (["https://other.example.org", PAGE], PAGE)])
async def test_a_page_of_a_named_origin_may_ask(cors: list[str], allowed: str) -> None:
    front = Front(KEY, cors=cors)
    answer = await front.ask(PREFLIGHT, "/v1/chat/completions", "OPTIONS")
    assert (answer.status, answer.bodies) == (204, [b""])
    assert answer.headers["access-control-allow-origin"] == allowed
    assert answer.headers["access-control-allow-methods"] == "GET, HEAD, POST, DELETE"
    assert answer.headers["access-control-allow-headers"] == "authorization,x-stainless-os"
    assert answer.headers["access-control-max-age"] == "600"
    assert ("vary", "origin") in answer.pairs
    assert not front.seen
    answer = await front.ask({**BEARER, "origin": PAGE})
    assert answer.bodies == [b"one", b"two"]
    assert answer.headers["access-control-allow-origin"] == allowed
    assert "x-ratelimit-remaining-tokens" in answer.headers["access-control-expose-headers"]
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert ("vary", "origin") in answer.pairs
    assert "access-control-allow-credentials" not in answer.headers
    assert STREAM_HEADERS == [(b"content-type", b"text/event-stream")], "the application's list is its own"


async def test_a_page_may_see_that_its_key_is_wrong() -> None:
    answer = await Front(KEY, cors=[PAGE]).ask({"origin": PAGE})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, PAGE)


@pytest.mark.parametrize("origin", ["https://evil.example.org", PAGE + ".evil.org", "null", PAGE.upper(), PAGE + "/", "*"])
async def test_a_page_of_another_origin_may_not(origin: str) -> None:
    front = Front(KEY, cors=[PAGE])
    for answer in (
        await front.ask({**PREFLIGHT, "origin": origin}, "/v1/chat/completions", "OPTIONS"),
        await front.ask({**BEARER, "origin": origin}),
    ):
        assert "access-control-allow-origin" not in answer.headers
        assert ("vary", "origin") in answer.pairs


async def test_what_is_no_page_is_answered_as_ever() -> None:
    answer = await Front(KEY, cors=["*"]).ask(BEARER)
    assert answer.pairs == [("content-type", "text/event-stream")]


@pytest.mark.parametrize("names", ["x\r\nset-cookie: a=b", "x: y", "ä", "a" * 5000])
async def test_a_preflight_cannot_make_headers(names: str) -> None:
    answer = await Front(KEY, cors=[PAGE]).ask({**PREFLIGHT, "access-control-request-headers": names}, method="OPTIONS")
    assert answer.status == 204
    assert "access-control-allow-headers" not in answer.headers


# The key of the metrics.


async def test_metrics_can_need_a_key_of_their_own() -> None:
    front = Front(KEY, metrics_key="psk-prometheus")
    assert (await front.ask({"authorization": "Bearer psk-prometheus"}, "/metrics")).status == 200
    assert (await front.ask({"authorization": "Bearer psk-prometheus"}, "/v1/models")).status == 401, "it opens nothing else"
    for headers, reason in (({}, "missing"), (BEARER, "unknown")):
        answer = await front.ask(headers, "/metrics")
        assert (answer.status, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert front.tally.failed_authentications[reason,] >= 1
    assert (await front.ask({}, "/live")).status == 200


# Web pages and servers without keys.

HERE = {"host": "127.0.0.1:8000"}
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "LOCALHOST:8000",
        "localhost.",
        "app.localhost:80",
        "127.0.0.1:8000",
        "10.0.0.7",
        "[::1]:8000",
        "[fe80::1]",
    ],
)
async def test_names_that_no_page_can_have(host: str) -> None:
    front = Front(hosts=())
    for _ in range(2):
        assert (await front.ask({"host": host})).status == 200
    assert not front.tally.pages_refused


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost", ":80", "::1"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/metrics", "/live"])
async def test_a_page_whose_name_means_this_machine_is_refused(host: str, path: str) -> None:
    """DNS rebinding: for the browser the page and this server are one origin."""
    front = Front(hosts=())
    answer = await front.ask({"host": host, "origin": f"http://{host}"}, path)
    assert (answer.status, answer.json["error"]["code"]) == (403, "host_not_allowed")
    assert "--allowed-host" in answer.json["error"]["message"]
    assert not front.seen
    assert front.tally.pages_refused == {("host_not_allowed",): 1}


async def test_names_that_are_configured() -> None:
    front = Front(hosts=("gpu1.example.org",))
    assert (await front.ask({"host": "GPU1.example.org:8000"})).status == 200
    assert (await front.ask({"host": "gpu2.example.org:8000"})).status == 403
    assert (await Front(hosts=("*",)).ask({"host": "evil.example"})).status == 200
    assert (await Front(hosts=()).ask({})).status == 200, "no browser leaves it out"
    assert (await Front(hosts=()).ask({"host": ""})).status == 200, "the same, as granian says it"
    assert (await Front(hosts=()).ask({"host": "", "origin": "null"})).status == 403


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost:3000", "http://127.0.0.1", "http://127.0.0.1:8000.evil.example"]
)
async def test_a_page_of_another_origin_is_refused(origin: str, method: str) -> None:
    front = Front(hosts=())
    answer = await front.ask({**HERE, **JSON, "origin": origin}, "/v1/chat/completions", method)
    assert (answer.status, answer.json["error"]["code"]) == (403, "origin_not_allowed")
    assert "--cors-origin" in answer.json["error"]["message"]
    assert not front.seen


async def test_pages_that_may_ask() -> None:
    for front, origin in (
        (Front(hosts=()), "http://127.0.0.1:8000"),
        (Front(hosts=(), cors=[PAGE]), PAGE),
        (Front(hosts=(), cors=["*"]), "null"),
    ):
        assert (await front.ask({**HERE, **JSON, "origin": origin}, method="POST")).status == 200
    front = Front(hosts=(), cors=[PAGE])
    assert (await front.ask({**HERE, **PREFLIGHT}, method="OPTIONS")).headers["access-control-allow-origin"] == PAGE
    assert (await front.ask({**HERE, **JSON, "origin": "https://evil.example"}, method="POST")).status == 403


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "json", ""],
)
async def test_a_body_that_a_form_can_send_is_refused(content_type: str) -> None:
    front = Front(hosts=())
    answer = await front.ask({**HERE, "content-type": content_type}, "/v1/messages", "POST")
    assert (answer.status, answer.json["error"]["type"]) == (415, "invalid_request_error")
    assert "expected application/json (with curl: -H 'content-type: application/json')" in answer.json["error"]["message"]
    assert not front.seen
    assert front.received == 1, "its sender reads the answer"
    assert (await front.ask({**HERE, "content-type": content_type})).status == 200, "it has no body"


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/ld+json"])
async def test_json_is_taken(content_type: str) -> None:
    assert (await Front(hosts=()).ask({**HERE, "content-type": content_type}, method="POST")).status == 200
    assert (await Front(hosts=()).ask(HERE, method="POST")).status == 200, "a program that says nothing; browsers send an origin then"


async def test_with_keys_only_the_configured_names_count() -> None:
    page = {**BEARER, "host": "chat.example.org", "origin": "https://evil.example", "content-type": "text/plain"}
    assert (await Front(KEY).ask(page, method="POST")).status == 200, "a page does not know the key"
    assert (await Front(KEY, hosts=("chat.example.org",)).ask(page, method="POST")).status == 200
    assert (await Front(KEY, hosts=("other.example.org",)).ask(page, method="POST")).status == 403


async def test_hosts_that_clients_invent_take_no_memory_for_ever() -> None:
    front = Front(hosts=())
    for number in range(gate.MAX_ACCEPTED + 100):
        assert (await front.ask({"host": f"10.0.{number // 256}.{number % 256}"})).status == 200
    assert (await front.ask({"host": "evil.example"})).status == 403


async def test_long_hosts_are_not_remembered() -> None:
    front = Front(hosts=())
    tracemalloc.start()
    for number in range(200):
        assert (await front.ask({"host": "127.0.0.1:" + str(number).zfill(60_000)})).status == 200
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 2**20


@pytest.mark.parametrize("host", ["*", "localhost", "gpu1.example.org", "a_b-c.d", "x"])
def test_hosts(host: str) -> None:
    assert check_host(host) == host


@pytest.mark.parametrize("host", ["", "http://a", "a:80", "A.example", "a/b", "-a", "a-", "a b", "*.example.org"])
def test_what_is_no_host(host: str) -> None:
    with pytest.raises(ValueError, match="expected a host's name"):
        check_host(host)


@pytest.mark.parametrize("origin", ["*", PAGE, "http://localhost:3000", "http://[::1]:8080", "tauri://localhost", "app.x+y://host_1"])
def test_origins(origin: str) -> None:
    assert check_origin(origin) == origin


@pytest.mark.parametrize(
    "origin", ["", "chat.example.org", PAGE + "/", PAGE + "/x", PAGE.upper(), "https://a,https://b", "null", "https://a b"]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ValueError, match="expected scheme://host"):
        check_origin(origin)
