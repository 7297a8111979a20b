"""The engine for engines behind HTTP, against servers that do what no right server does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from penstock.backends.external.engine import Chunk, EngineDied, EngineRefused, EngineRequest, EventEndpoints
from penstock.backends.external.images import Placeholder
from penstock.backends.http.client import Broken, EngineClient
from penstock.backends.http.engine import HttpEngine, probe
from penstock.config.engines import HttpEngineSettings, Route, checked_url
from penstock.config.setting import settings_of
from penstock.text.tokenizers.words import WordTokenizer
from penstock.wire.errors import ConfigError
from penstock.wire.messages import Fault

TOKENIZER = WordTokenizer()
SECONDS = 20.0

Reply = Callable[["Asked"], Awaitable[None]]


class Asked:
    """One request to the server, and how it is answered."""

    def __init__(self, path: str, headers: dict[str, str], body: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.path = path
        self.headers = headers
        self.body = body
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self, status: int, content: Any, kind: str = "application/json", headers: str = "") -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\nconnection: close\r\n{headers}\r\n"
        await self.send(head.encode() + data)

    async def stream(self, *events: Any, ends: bool = True) -> None:
        """Begins an answer with events. If it is not ended, the connection breaks."""
        await self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n")
        for event in events:
            await self.event(event)
        if ends:
            await self.event("[DONE]")
            await self.send(b"0\r\n\r\n")

    async def event(self, event: Any) -> None:
        data = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
        await self.send(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def until_left(self) -> None:
        """Waits until the other side closes the connection."""
        assert await self._reader.read() == b""


class Upstream:
    """A server whose answers a test decides. It keeps the requests."""

    def __init__(self, replies: dict[str, Reply]) -> None:
        self._replies = replies
        self.asked: list[Asked] = []
        self.errors: list[BaseException] = []
        self.url = ""
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def stop_listening(self) -> None:
        assert self._server is not None
        self._server.close()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            asked = Asked(first.split()[1], headers, json.loads(body) if body else None, reader, writer)
            self.asked.append(asked)
            await self._replies.get(asked.path, not_found)(asked)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except AssertionError as error:
            self.errors.append(error)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def posts(self, path: str) -> list[Any]:
        return [asked.body for asked in self.asked if asked.path == path and asked.body is not None]


def saying(status: int, content: Any, kind: str = "application/json", headers: str = "") -> Reply:
    async def reply(asked: Asked) -> None:
        await asked.answer(status, content, kind, headers)

    return reply


not_found = saying(404, {"detail": "Not Found"})
healthy = saying(200, b"")

MODELS = {"data": [{"id": "model", "max_model_len": 1000}]}
SGLANG_INFO = {
    "version": "0.5.23",
    "max_total_num_tokens": 4096,
    "max_req_input_len": 994,
    "page_size": 32,
    "max_running_requests": 8,
    "incremental_streaming_output": True,
    "internal_states": [],
}


def text(value: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": value, "finish_reason": finish}]}


def completions(streamed: Reply, whole: Any = None) -> Reply:
    """Answers the probe at the start, then streams what the test decides."""

    async def reply(asked: Asked) -> None:
        if asked.body.get("stream"):
            await streamed(asked)
        else:
            await asked.answer(200, whole or text(" water", "length"))

    return reply


def openai(streamed: Reply, **more: Reply) -> dict[str, Reply]:
    return {"/v1/models": saying(200, MODELS), "/health": healthy, "/v1/completions": completions(streamed), **more}


def sglang(generate: Reply, **info: Any) -> dict[str, Reply]:
    async def reply(asked: Asked) -> None:
        # The question at the start whether it takes a salt has no id.
        await (not_found if "cache_salt" in asked.body and "rid" not in asked.body else generate)(asked)

    return {
        "/server_info": saying(200, SGLANG_INFO | info),
        "/generate": reply,
        "/abort_request": healthy,
        "/close_session": healthy,
    }


@contextlib.asynccontextmanager
async def upstream(replies: dict[str, Reply]) -> AsyncIterator[Upstream]:
    server = Upstream(replies)
    await server.start()
    try:
        async with asyncio.timeout(SECONDS):
            yield server
    finally:
        await server.stop()
        assert not server.errors, server.errors


@contextlib.asynccontextmanager
async def started(server: Upstream, deaths: list[str] | None = None, **settings: Any) -> AsyncIterator[HttpEngine]:
    watch, death = settings.pop("watch_seconds", 60.0), settings.pop("death_seconds", 0.2)
    engine = HttpEngine(HttpEngineSettings(server.url, **settings), TOKENIZER, watch_seconds=watch, death_seconds=death)
    await engine.start((deaths if deaths is not None else []).append)
    try:
        yield engine
    finally:
        await engine.close()


def request(**fields: Any) -> EngineRequest:
    return EngineRequest(**{"id": "a" * 32, "token_ids": (300, 301), "max_tokens": 5, "seed": 1, **fields})


async def read_into(seen: list[Chunk], engine: HttpEngine) -> None:
    """Keeps the chunks from before an error."""
    async for chunk in engine.generate(request()):
        seen.append(chunk)  # noqa: PERF401, a list that is made at the end would not be made


async def read_all(engine: HttpEngine, **fields: Any) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request(**fields))]


async def fault_of(engine: HttpEngine, **fields: Any) -> Fault:
    with pytest.raises(EngineRefused) as caught:
        await read_all(engine, **fields)
    return caught.value.fault


def shown(chunks: list[Chunk]) -> str:
    return TOKENIZER.detokenizer().feed([token for chunk in chunks for token in chunk.token_ids])


# Settings.


@pytest.mark.parametrize(
    ("url", "right"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://host:8000/", "http://host:8000"),
        ("https://host/v1/", "https://host"),
        ("http://host/behind/proxy/v1", "http://host/behind/proxy"),
        ("http://[::1]:30000", "http://[::1]:30000"),
    ],
)
def test_an_address_is_taken_with_or_without_the_api(url: str, right: str) -> None:
    assert checked_url(url) == right


@pytest.mark.parametrize(
    "url", ["", "host:8000", "ftp://host", "unix:/a", "http://", "http://host:99999", "http://h/?a=1", "http://h#x", "http://h\n"]
)
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        checked_url(url)


@pytest.mark.parametrize(
    "url",
    [
        *("http://user:geheim@host", "user:geheim@host:80", "http:user:geheim@host", "http://user:geheim#1@host"),
        *("http://host/v1?key=geheim", "http://host/#geheim"),
    ],
)
def test_a_password_is_never_shown(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked_url(url)
    assert "geheim" not in str(caught.value)
    assert "PENSTOCK_ENGINE_API_KEY" in str(caught.value)


def test_the_key_is_never_shown() -> None:
    assert "geheim" not in repr(HttpEngineSettings("http://host", api_key="geheim"))
    with pytest.raises(ConfigError) as caught:
        settings_of(HttpEngineSettings)["engine_api_key"].read("geheim\r\nx: y", "PENSTOCK_ENGINE_API_KEY")
    assert "geheim" not in str(caught.value)


async def test_the_key_goes_with_every_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def reply(asked: Asked) -> None:
        await asked.stream(text(" water", "length"))

    async with upstream(openai(reply)) as server, started(server, api_key="geheim") as engine:
        await read_all(engine)
        assert {asked.headers.get("authorization") for asked in server.asked} == {"Bearer geheim"}
    assert "geheim" not in caplog.text


# Finding out what is there.


async def test_nobody_there() -> None:
    async with upstream({}) as server:
        url = server.url
    with pytest.raises(ConfigError, match=f"{url}: GET /server_info: cannot connect: Connection refused"):
        await HttpEngine(HttpEngineSettings(url), TOKENIZER).start(print)
    assert "cannot connect" in ((await probe(HttpEngineSettings(url))).problem or "")


@pytest.mark.parametrize("route", ["auto", "vllm", "openai", "sglang"])
async def test_a_server_of_another_kind(route: Route) -> None:
    async with upstream({"/v1/models": saying(200, b"<html>hello</html>", "text/html")}) as server:
        with pytest.raises(ConfigError) as caught:
            await HttpEngine(HttpEngineSettings(server.url, route=route, model_name="model"), TOKENIZER).start(print)
        assert "404 Not Found" in str(caught.value)
        assert server.url in str(caught.value)
        report = await probe(HttpEngineSettings(server.url, route=route, model_name="model"))
        assert report.problem is not None


async def test_a_failing_server_is_not_an_engine() -> None:
    replies = {"/v1/models": saying(200, MODELS), "/v1/completions": saying(500, b"kaputt", "text/plain")}
    async with upstream(replies) as server:
        with pytest.raises(ConfigError, match="POST /v1/completions: 500 kaputt"):
            await HttpEngine(HttpEngineSettings(server.url), TOKENIZER).start(print)


async def test_a_redirect_is_not_followed() -> None:
    async with upstream({}) as elsewhere, upstream({}) as server:
        moved = saying(307, b"", headers=f"location: {elsewhere.url}/server_info\r\n")
        server._replies.update(dict.fromkeys(("/server_info", "/v1/models", "/v1/completions"), moved))
        with pytest.raises(ConfigError, match="GET /server_info: 307"):
            await HttpEngine(HttpEngineSettings(server.url, model_name="x"), TOKENIZER).start(print)
        assert not elsewhere.asked


async def test_a_wrong_key_is_named() -> None:
    denied = saying(401, {"error": "Unauthorized"})
    async with upstream({"/server_info": denied}) as server:
        with pytest.raises(ConfigError, match=r"needs an API key; set PENSTOCK_ENGINE_API_KEY"):
            await HttpEngine(HttpEngineSettings(server.url), TOKENIZER).start(print)
        with pytest.raises(ConfigError, match="rejects the API key") as caught:
            await HttpEngine(HttpEngineSettings(server.url, api_key="geheim"), TOKENIZER).start(print)
        assert "geheim" not in str(caught.value)


async def test_sglang_is_recognized_by_its_information() -> None:
    async with upstream(sglang(not_found, kv_events={"endpoint_port_base": 5557})) as server:
        engine = HttpEngine(HttpEngineSettings(server.url, kv_events="tcp://x:1", max_batch=5), TOKENIZER)
        facts = await engine.start(print)
        await engine.close()
        assert (facts.context_length, facts.block_size, facts.kv_blocks, facts.max_batch) == (998, 32, 128, 8)
        assert facts.capabilities == ("logprobs", "prompt_logprobs")
        assert facts.events == EventEndpoints("tcp://x:1")
        report = await probe(HttpEngineSettings(server.url))
    assert (report.engine, report.version, report.problem) == ("SGLang over HTTP", "0.5.23", None)
    features = {feature.name: feature for feature in report.features}
    assert features["exact token ids"].is_available
    assert not features["grammar"].is_available
    assert "port 5557" in features["KV events"].detail


@pytest.mark.parametrize("status", [200, 400])
async def test_whether_a_server_reads_images_is_found_out_with_one(status: int, caplog: pytest.LogCaptureFixture) -> None:
    async with upstream(sglang(saying(status, {"error": {"message": "text only"}}))) as server:
        engine = HttpEngine(HttpEngineSettings(server.url), TOKENIZER, Placeholder((8, 9), 9))
        facts = await engine.start(print)
        await engine.close()
        asked = server.posts("/generate")[-1]
    assert facts.reads_images == (status == 200)
    assert asked["input_ids"] == [8, 9]
    assert asked["image_data"][0].startswith("data:image/png;base64,")
    assert ("images are refused" in caplog.text) == (status != 200)


async def test_a_server_of_completions_reads_no_images(caplog: pytest.LogCaptureFixture) -> None:
    replies = {"/v1/models": saying(200, MODELS), "/v1/completions": saying(200, text("a", "length"))}
    async with upstream(replies) as server:
        engine = HttpEngine(HttpEngineSettings(server.url), TOKENIZER, Placeholder((8, 9), 9))
        facts = await engine.start(print)
        await engine.close()
    assert not facts.reads_images
    assert "vLLM with --enable-scale-out" in caplog.text


def salted(answer: Any, good: int, bad: int) -> Reply:
    """Answers without a salt, with one, and with one that is not a text."""

    async def reply(asked: Asked) -> None:
        salt = asked.body.get("cache_salt")
        status = 200 if salt is None else good if isinstance(salt, str) else bad
        await asked.answer(status, answer if status == 200 else {"error": "about cache_salt"})

    return reply


@pytest.mark.parametrize(
    ("good", "bad", "isolates"),
    [(200, 400, True), (200, 422, True), (200, 200, False), (400, 400, False), (200, 500, False), (200, 404, False), (500, 400, False)],
)
async def test_a_server_isolates_if_it_reads_the_salt(good: int, bad: int, isolates: bool) -> None:
    """One that ignores the field shares KV between tenants; one that only fails does not show that it reads it."""
    generated = salted({"output_ids": [1], "meta_info": {}}, good, bad)
    completed = salted(text(" water", "length"), good, bad)
    for replies in (sglang(not_found) | {"/generate": generated}, openai(not_found) | {"/v1/completions": completed}):
        async with upstream(replies) as server:
            engine = HttpEngine(HttpEngineSettings(server.url), TOKENIZER)
            facts = await engine.start(print)
            await engine.close()
            assert ("isolation" in facts.capabilities) is isolates
            (feature,) = [feature for feature in engine.report.features if feature.name == "isolation"]
            assert feature.is_available is isolates
            assert isolates or "--share-prefixes" in feature.detail


async def test_an_sglang_that_would_lose_tokens_is_refused() -> None:
    async with upstream(sglang(not_found, version="0.5.9")) as server:
        with pytest.raises(ConfigError, match=r"0\.5\.9 streams only new tokens, and drops"):
            await HttpEngine(HttpEngineSettings(server.url), TOKENIZER).start(print)


@pytest.mark.parametrize("is_incremental", [True, False])
async def test_an_unreported_mode_is_found_by_a_test(is_incremental: bool) -> None:
    async def generate(asked: Asked) -> None:
        made = [1] * asked.body["sampling_params"]["max_new_tokens"]
        cut = {"output_ids": made[:3], "meta_info": {"finish_reason": None, "completion_tokens": 3}}
        rest = made[3:] if is_incremental else made
        await asked.stream(cut, {"output_ids": rest, "meta_info": {"finish_reason": {"type": "length"}, "completion_tokens": len(made)}})

    replies = sglang(generate) | {"/server_info": not_found, "/model_info": saying(200, {"is_generation": True})}
    async with upstream(replies | {"/v1/models": saying(200, MODELS)}) as server, started(server) as engine:
        chunks = await read_all(engine, max_tokens=5)
        assert [chunk.token_ids for chunk in chunks] == [(1, 1, 1), (1, 1)]


async def test_an_unknown_mode_is_refused() -> None:
    async def generate(asked: Asked) -> None:
        await asked.stream({"output_ids": [1] * 8, "meta_info": {}})

    replies = sglang(generate) | {"/server_info": not_found, "/model_info": saying(200, {"is_generation": True})}
    async with upstream(replies) as server:
        with pytest.raises(ConfigError, match="whether its events repeat earlier tokens"):
            await HttpEngine(HttpEngineSettings(server.url), TOKENIZER).start(print)


async def test_missing_features_are_logged_by_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with upstream(openai(not_found)) as server, started(server) as engine:
        missing = {feature.name for feature in engine.report.features if not feature.is_available}
        assert missing >= {"exact token ids", "logprobs", "prompt logprobs", "KV events", "stop ids", "exact usage", "grammar"}
        (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert all(name in line for name in missing)


async def test_an_unknown_context_length_must_be_set() -> None:
    replies = openai(not_found) | {"/v1/models": saying(200, {"data": [{"id": "model"}]})}
    async with upstream(replies) as server:
        with pytest.raises(ConfigError, match="--context-length"):
            await HttpEngine(HttpEngineSettings(server.url), TOKENIZER).start(print)
        engine = HttpEngine(HttpEngineSettings(server.url, context_length=77, block_size=8, max_batch=5), TOKENIZER)
        facts = await engine.start(print)
        await engine.close()
        assert (facts.context_length, facts.block_size, facts.max_batch) == (77, 8, 5)
        with pytest.raises(ConfigError, match="no --upstream-model 'other': it has model"):
            await HttpEngine(HttpEngineSettings(server.url, model_name="other"), TOKENIZER).start(print)


async def test_llama_cpp_reports_its_context() -> None:
    model = {"id": "model", "owned_by": "llamacpp", "meta": {"n_ctx": 512, "n_ctx_train": 8192}}
    async with upstream(openai(not_found) | {"/v1/models": saying(200, {"data": [model]})}) as server:
        engine = HttpEngine(HttpEngineSettings(server.url), TOKENIZER)
        facts = await engine.start(print)
        await engine.close()
        assert (facts.context_length, engine.report.engine) == (512, "llama.cpp over HTTP")


async def test_one_of_several_models_must_be_named() -> None:
    models = [{"id": name, "max_model_len": length} for name, length in (("base", 100), ("fine", 200))]
    async with upstream(openai(not_found) | {"/v1/models": saying(200, {"data": models})}) as server:
        with pytest.raises(ConfigError, match="the server has several models: set --upstream-model to one of base, fine"):
            await HttpEngine(HttpEngineSettings(server.url), TOKENIZER).start(print)
        engine = HttpEngine(HttpEngineSettings(server.url, model_name="fine"), TOKENIZER)
        facts = await engine.start(print)
        await engine.close()
        assert facts.context_length == 200


# Generating.


async def test_events_cut_anywhere_lose_nothing() -> None:
    events = [text(value) for value in (" wa", "ter", " grö", "ßer", " 😀")]
    body = b": hello\r\n\r\n" + b"".join(f"data: {json.dumps(event, ensure_ascii=False)}\r\n\r\n".encode() for event in events)
    body += f"data: {json.dumps(text('', 'stop'))}\n\ndata: [DONE]\n\n".encode()

    async def reply(asked: Asked) -> None:
        await asked.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n")
        for start in range(0, len(body), 3):
            await asked.send(body[start : start + 3])
            await asyncio.sleep(0)

    async with upstream(openai(reply)) as server, started(server) as engine:
        chunks = await read_all(engine)
        assert shown(chunks) == " water größer 😀"
        assert [chunk.finish for chunk in chunks if chunk.finish] == ["stop"]


@pytest.mark.parametrize(
    ("status", "code", "retryable"),
    [
        (400, "engine_refused", False),
        (404, "engine_refused", False),
        (307, "engine_failed", True),
        (401, "engine_failed", True),
        (429, "queue_full", True),
        (503, "engine_failed", True),
        (500, "engine_failed", True),
    ],
)
async def test_a_refusal_has_the_message_of_the_engine(status: int, code: str, retryable: bool) -> None:
    refusing = saying(status, {"error": {"message": "so nicht", "code": status}})
    async with upstream(openai(refusing)) as server, started(server) as engine:
        assert await fault_of(engine) == Fault(code, f"the engine answered {status}: so nicht", retryable)


async def test_a_refusal_that_repeats_the_request() -> None:
    async with upstream(openai(saying(400, {"detail": "so nicht" + 100_000 * "x"}))) as server, started(server) as engine:
        fault = await fault_of(engine)
        assert (fault.code, fault.retryable) == ("engine_refused", False)
        assert "so nicht" in fault.message


@pytest.mark.parametrize("body", [b'{"detail": "\xe4"}', b"[" * 10_000], ids=["no UTF-8", "too deep"])
async def test_a_refusal_that_cannot_be_decoded(body: bytes) -> None:
    async with upstream(openai(saying(400, body))) as server, started(server) as engine:
        assert (await fault_of(engine)).code == "engine_refused"


async def test_an_error_in_mid_answer() -> None:
    async def reply(asked: Asked) -> None:
        await asked.stream(text(" water"), {"error": {"message": "out of memory", "code": 500}})

    async with upstream(openai(reply)) as server, started(server) as engine:
        seen: list[Chunk] = []
        with pytest.raises(EngineRefused, match="out of memory") as caught:
            await read_into(seen, engine)
        assert shown(seen) == " water"
        assert caught.value.fault.retryable


@pytest.mark.parametrize("value", [b'"\xe4"', b"[" * 10_000], ids=["no UTF-8", "too deep"])
@pytest.mark.parametrize("route", ["sglang", "openai"])
async def test_an_event_that_cannot_be_read_is_a_retryable_loss(route: Route, value: bytes) -> None:
    async def reply(asked: Asked) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        await asked.send(head + b'data: {"error": ' + value + b"}\n\n")

    async with upstream(openai(reply) | sglang(reply)) as server, started(server, route=route) as engine:
        fault = await fault_of(engine)
        assert (fault.code, fault.retryable) == ("engine_lost", True)


@pytest.mark.parametrize("ending", ["broken", "closed", "done"])
async def test_an_answer_that_breaks_off_is_retryable(ending: str) -> None:
    async def reply(asked: Asked) -> None:
        if ending == "done":
            await asked.stream(text(" water"))
        elif ending == "broken":
            await asked.stream(text(" water"), ends=False)
        else:
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
            await asked.send(head + f"data: {json.dumps(text(' water'))}\n\ndata: {{".encode())

    async with upstream(openai(reply)) as server, started(server) as engine:
        seen: list[Chunk] = []
        with pytest.raises(EngineRefused) as caught:
            await read_into(seen, engine)
        assert shown(seen) == " water"
        assert (caught.value.fault.code, caught.value.fault.retryable) == ("engine_lost", True)


async def test_a_silent_server_times_out() -> None:
    async def reply(asked: Asked) -> None:
        await asked.stream(text(" water"), ends=False)
        await asked.until_left()

    async with upstream(openai(reply)) as server, started(server, idle_seconds=0.2) as engine:
        fault = await fault_of(engine)
        assert (fault.code, fault.retryable) == ("engine_lost", True)
        assert "silent" in fault.message


async def test_the_finish_does_not_wait_for_the_end_of_the_answer() -> None:
    """The server never ends its answer."""

    async def reply(asked: Asked) -> None:
        await asked.stream(text(" water", "length"), ends=False)
        await asked.until_left()

    async with upstream(openai(reply)) as server, started(server) as engine:
        assert [chunk.finish for chunk in await read_all(engine)] == ["length"]


@pytest.mark.parametrize("finish", ["length", None])
async def test_the_finish_does_not_wait_for_an_endless_answer(finish: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the finish, or after `[DONE]`."""
    monkeypatch.setattr("penstock.backends.http.client.ENDING_SECONDS", 0.1)

    async def reply(asked: Asked) -> None:
        await asked.stream(text(" water", finish), *([] if finish else ["[DONE]"]), ends=False)
        while True:
            # Until nobody listens any more.
            await asked.send(b"3\r\n:\n\n\r\n")
            await asyncio.sleep(0.01)

    async with upstream(openai(reply)) as server, started(server) as engine:
        if finish:
            assert [chunk.finish for chunk in await read_all(engine)] == [finish]
        else:
            assert (await fault_of(engine)).code == "engine_lost"


async def test_an_answer_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backends.http.client.MAX_ANSWER_BYTES", 10_000)

    async def reply(asked: Asked) -> None:
        await asked.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\ndata: ")
        while True:
            await asked.send(b"x" * 1000)

    async with upstream(openai(reply)) as server, started(server) as engine:
        assert "longer than 10,000 bytes" in (await fault_of(engine)).message


@pytest.mark.parametrize("answered", [0, 1], ids=["new", "kept"])
async def test_only_requests_that_the_server_did_not_read_are_sent_again(answered: int) -> None:
    """The server closes its first connection after `answered` answers, with one request unanswered. It answers later connections."""
    asked_on: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = len(set(asked_on))
        with contextlib.suppress(asyncio.IncompleteReadError), contextlib.closing(writer):
            while True:
                await reader.readuntil(b"\r\n\r\n{}")
                asked_on.append(connection)
                if connection == 0 and asked_on.count(0) > answered:
                    return
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = EngineClient(HttpEngineSettings(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    client.open()
    async with server, contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(client.close)
        if answered:
            await client.ask("/", {}, SECONDS)
            assert (await client.ask("/", {}, SECONDS)).status == 200
            assert asked_on == [0, 0, 1]
        else:
            with pytest.raises(Broken, match="closed before the answer"):
                await client.ask("/", {}, SECONDS)
            assert asked_on == [0]


@pytest.mark.parametrize("phase", ["unanswered", "begun", "streaming"])
async def test_leaving_closes_the_connection_and_aborts_the_request(phase: str) -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def generate(asked: Asked) -> None:
        if phase != "unanswered":
            told = {"output_ids": [300], "meta_info": {"finish_reason": None, "completion_tokens": 1}}
            await asked.stream(*([told] if phase == "streaming" else []), ends=False)
        arrived.set()
        await asked.until_left()
        left.set()

    async with upstream(sglang(generate)) as server, started(server) as engine:
        chunks = engine.generate(request())
        if phase == "streaming":
            assert (await anext(chunks)).token_ids == (300,)
            await chunks.aclose()
        else:
            waiting = asyncio.ensure_future(anext(chunks))
            await arrived.wait()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert server.posts("/abort_request") == [{"rid": "a" * 32}]
        await left.wait()


async def test_a_second_cancel_does_not_stop_the_abort() -> None:
    asked_to_abort, may_answer = asyncio.Event(), asyncio.Event()

    async def generate(asked: Asked) -> None:
        await asked.stream(ends=False)
        await asked.until_left()

    async def abort(asked: Asked) -> None:
        asked_to_abort.set()
        await may_answer.wait()
        await asked.answer(200, b"")

    async with upstream(sglang(generate) | {"/abort_request": abort}) as server:
        engine = HttpEngine(HttpEngineSettings(server.url), TOKENIZER)
        await engine.start(print)
        waiting = asyncio.ensure_future(anext(engine.generate(request())))
        while not any("rid" in body for body in server.posts("/generate")):
            await asyncio.sleep(0)
        waiting.cancel()
        await asked_to_abort.wait()
        assert not waiting.done()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        closing = asyncio.ensure_future(engine.close())
        for _ in range(200):
            # As long as it would take if nothing were waited for.
            await asyncio.sleep(0)
        assert not closing.done()
        may_answer.set()
        await closing


async def test_an_ended_request_is_not_aborted() -> None:
    async def generate(asked: Asked) -> None:
        if asked.body["sampling_params"]["max_new_tokens"] == 4:
            await asked.answer(400, {"error": {"message": "no"}})
            return
        await asked.stream({"output_ids": [300], "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 1}})

    async with upstream(sglang(generate)) as server, started(server) as engine:
        await read_all(engine, max_tokens=1)
        assert (await fault_of(engine, max_tokens=4)).code == "engine_refused"
        assert not server.posts("/abort_request")


async def test_a_request_that_ends_here_is_aborted_in_the_engine() -> None:
    async def generate(asked: Asked) -> None:
        first, second = (
            {"output_ids": [300 + count], "meta_info": {"finish_reason": None, "completion_tokens": 1 + count}} for count in range(2)
        )
        await asked.stream(first, second, ends=False)
        await asked.until_left()

    async with upstream(sglang(generate)) as server, started(server) as engine:
        chunks = await read_all(engine, ignore_eos=True, stop_ids=(300,))
        assert chunks == [Chunk((300,), finish="stop")]
        assert server.posts("/abort_request") == [{"rid": "a" * 32}]


async def test_sessions_are_closed_if_the_server_has_them() -> None:
    async with upstream(sglang(not_found, enable_session_radix_cache=True)) as server, started(server) as engine:
        await engine.close_session("s")
        assert server.posts("/close_session") == [{"session_id": "s"}]
    async with upstream(sglang(not_found)) as server, started(server) as engine:
        await engine.close_session("s")
        assert not server.posts("/close_session")


async def test_a_hundred_and_more_at_once() -> None:
    """Each has its own connection, and none waits for another."""
    count, here, all_here = 150, 0, asyncio.Event()

    async def reply(asked: Asked) -> None:
        nonlocal here
        here += 1
        if here == count:
            all_here.set()
        await all_here.wait()
        await asked.stream(text(" water", "length"))

    async with upstream(openai(reply)) as server, started(server) as engine:
        answers = await asyncio.gather(*[read_all(engine, id=f"{number:032}") for number in range(count)])
        assert {shown(chunks) for chunks in answers} == {" water"}


# Death.


async def test_a_server_that_is_gone_is_dead() -> None:
    async with upstream(openai(not_found)) as server, started(server) as engine:
        await engine.ping()
        await server.stop()
        with pytest.raises(EngineDied, match="cannot connect: Connection refused"):
            await read_all(engine)
        with pytest.raises(EngineDied, match="GET /health: cannot connect"):
            await engine.ping()


async def test_a_server_that_still_answers_is_not_dead() -> None:
    """It accepts no new connections, or this process has too many open files. The open connections continue."""
    may_end = asyncio.Event()

    async def reply(asked: Asked) -> None:
        await asked.stream(text(" water"), ends=False)
        await may_end.wait()
        await asked.event(text(" flows", "length"))

    async with upstream(openai(reply)) as server, started(server) as engine:
        chunks = engine.generate(request())
        seen = [await anext(chunks)]
        server.stop_listening()
        fault = await fault_of(engine)
        assert (fault.code, fault.retryable) == ("engine_lost", True)
        may_end.set()
        seen += [chunk async for chunk in chunks]
        assert shown(seen) == " water flows"
        with pytest.raises(EngineDied):
            await read_all(engine)


async def test_the_death_of_an_idle_server_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    """The address appears only in the log: clients see the reason of the death."""
    died = asyncio.Event()
    deaths: list[str] = []

    async with upstream(openai(not_found)) as server:
        engine = HttpEngine(HttpEngineSettings(server.url), TOKENIZER, watch_seconds=0.02, death_seconds=0.1)

        def on_death(reason: str) -> None:
            deaths.append(reason)
            died.set()

        await engine.start(on_death)
        await server.stop()
        await died.wait()
        await engine.close()
        assert deaths == ["its server is gone: GET /health: cannot connect: Connection refused"]
        assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
            f"the engine at {server.url} is gone: GET /health: cannot connect: Connection refused"
        ]


async def test_a_server_that_stays_broken_is_dead() -> None:
    answers = [saying(200, b""), saying(503, b""), saying(200, b"")]

    async def health(asked: Asked) -> None:
        await (answers.pop(0) if answers else saying(503, b""))(asked)

    async with upstream(openai(not_found) | {"/health": health}) as server, started(server) as engine:
        # The first answer was for the start.
        await engine.ping()
        with pytest.raises(EngineDied, match="GET /health answered 503"):
            await engine.ping()


async def test_a_server_that_is_silent_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be in a very long step."""
    monkeypatch.setattr("penstock.backends.http.engine.PING_SECONDS", 0.05)
    asked_again, count = asyncio.Event(), 0

    async def health(asked: Asked) -> None:
        nonlocal count
        count += 1
        if count in (2, 3, 4, 5, 6, 7):
            await asked.until_left()
            return
        await asked.answer(200, b"")
        asked_again.set()

    async with upstream(openai(not_found) | {"/health": health}) as server, started(server, death_seconds=0.05) as engine:
        await engine.ping()
        assert count == 8


async def test_a_dead_server_does_not_matter_after_close() -> None:
    deaths: list[str] = []
    async with upstream(openai(not_found)) as server:
        async with started(server, deaths, watch_seconds=0.01, death_seconds=0.01):
            pass
        await server.stop()
        await asyncio.sleep(0)
    assert not deaths
