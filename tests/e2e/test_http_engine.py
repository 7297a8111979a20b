"""An engine behind HTTP that is Penstock itself: a right server, with real streams, real cancellation and a real death."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from chat_model import chat_model
from e2e.harness import Server, wait_until
from penstock.backends.external.engine import Chunk, EngineDied, EngineRefused, EngineRequest
from penstock.backends.http.engine import HttpEngine, probe
from penstock.config.engines import HttpEngineSettings, Route
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.messages import Sampling

Serve = Callable[..., Server]

PROMPT = "The water flows under pressure"
GREEDY = Sampling(temperature=0.0)
KEY = {"authorization": "Bearer k"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return pack_tokenizer(chat_model()).load()


SIMULATOR = ("--step-ms", "2", "--context-length", "2000", "--served-name", "upstream")
"""With a model's tokenizer, its text has tokens that are pieces of characters, too."""


@pytest.fixture(scope="module")
def simulator() -> Iterator[Server]:
    """A server for all tests that leave it as it is."""
    server = Server("--model", str(chat_model()), *SIMULATOR, model="upstream").wait_ready()
    yield server
    assert server.stop() == 0, server.log


@contextlib.asynccontextmanager
async def running_engine(server: Server, tokenizer: Tokenizer, route: Route = "openai") -> AsyncIterator[HttpEngine]:
    engine = HttpEngine(HttpEngineSettings(server.url, route=route), tokenizer, death_seconds=0.3)
    await engine.start(print)
    try:
        yield engine
    finally:
        await engine.close()


def request(tokenizer: Tokenizer, **fields: Any) -> EngineRequest:
    given = {"id": secrets.token_hex(16), "token_ids": tuple(tokenizer.encode(PROMPT)), "max_tokens": 40, "seed": 1, **fields}
    return EngineRequest(**given)


async def read_all(engine: HttpEngine, asked: EngineRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(asked)]


def shown(tokenizer: Tokenizer, chunks: list[Chunk]) -> str:
    detokenizer = tokenizer.detokenizer()
    return "".join([detokenizer.feed(chunk.token_ids) for chunk in chunks]) + detokenizer.finish()


def directly(server: Server, asked: EngineRequest) -> Any:
    """What the upstream itself answers, all at once."""
    fields = {
        "prompt": list(asked.token_ids),
        "max_tokens": asked.max_tokens,
        "seed": asked.seed,
        "temperature": asked.sampling.temperature,
        "ignore_eos": asked.ignore_eos,
        "return_token_ids": True,
    }
    status, _, body = server.post("/v1/completions", **fields)
    assert status == 200, body
    return body["choices"][0]


async def test_the_text_is_the_upstreams(simulator: Server, tokenizer: Tokenizer) -> None:
    asks = [request(tokenizer, seed=seed, max_tokens=length) for seed in range(8) for length in (1, 7, 150)]
    async with running_engine(simulator, tokenizer) as engine:
        answers = await asyncio.gather(*[read_all(engine, asked) for asked in asks])
    for asked, chunks in zip(asks, answers, strict=True):
        expected = await asyncio.to_thread(directly, simulator, asked)
        assert shown(tokenizer, chunks) == expected["text"]
        assert chunks[-1].finish == expected["finish_reason"]
        assert (chunks[-1].token_ids[-1:] == (tokenizer.end_id,)) == (expected["finish_reason"] == "stop")


async def test_by_the_best_route_the_tokens_are_too(simulator: Server, tokenizer: Tokenizer) -> None:
    asks = [request(tokenizer, seed=seed, max_tokens=150) for seed in range(64)]
    async with running_engine(simulator, tokenizer, "auto") as engine:
        answers = await asyncio.gather(*[read_all(engine, asked) for asked in asks])
    for asked, chunks in zip(asks, answers, strict=True):
        expected = await asyncio.to_thread(directly, simulator, asked)
        assert [token for chunk in chunks for token in chunk.token_ids] == expected["token_ids"]
        assert chunks[-1].finish == expected["finish_reason"]


async def test_the_report_says_what_is_there(simulator: Server) -> None:
    exact, text = [await probe(HttpEngineSettings(simulator.url, route=route)) for route in ("auto", "openai")]
    assert exact.engine == text.engine == "Penstock over HTTP"
    assert [report.features[0].is_available for report in (exact, text)] == [True, False]
    assert {feature.name for feature in text.features} >= {
        "logprobs",
        "prompt logprobs",
        "KV events",
        "stop ids",
        "exact usage",
        "sessions",
    }
    refused = await probe(HttpEngineSettings(simulator.url, route="sglang"))
    assert refused.problem is not None
    assert "SGLang was not found" in refused.problem
    assert simulator.url in refused.problem


async def test_the_upstream_shares_nothing_between_salts(simulator: Server, tokenizer: Tokenizer) -> None:
    prompt = tuple(tokenizer.encode(f"{PROMPT} and salt " * 10))
    async with running_engine(simulator, tokenizer, "auto") as engine:
        found = []
        for salt in ("0a", "0a", "0b", None, "0b"):
            chunks = await read_all(engine, request(tokenizer, token_ids=prompt, max_tokens=1, salt=salt))
            found.append(chunks[-1].cached_tokens)
    assert found[0] == found[2] == found[3] == 0
    assert found[1] == found[4]
    assert (found[1] or 0) > 32


class PlainServer(http.server.BaseHTTPRequestHandler):
    """OpenAI's completions as many servers have them: fields that it does not know are ignored."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "plain", "max_model_len": 2000}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = {"choices": [{"index": 0, "text": " water", "finish_reason": "length"}]}
        self._answer(b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n" if body.get("stream") else answer)

    def _answer(self, content: Any) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if isinstance(content, bytes) else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("flags", [(), ("--share-prefixes",)])
def test_a_server_that_cannot_isolate_is_not_used_with_keys_unless_they_share(serve: Serve, flags: tuple[str, ...]) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), PlainServer) as plain:
        threading.Thread(target=plain.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{plain.server_port}"
        server = serve("--url", url, "--model", str(chat_model()), *flags, engine="http", environment={"PENSTOCK_API_KEY": "k"})
        body = json.dumps({"model": server.request("GET", "/v1/models", None, KEY)[2]["data"][0]["id"], "prompt": "x", "max_tokens": 1})
        status, _, answer = server.request("POST", "/v1/completions", body.encode(), KEY)
        warned = [line for line in server.log if "refuses requests" in line]
        if flags:
            assert (status, warned) == (200, []), answer
        else:
            assert (status, answer["error"]["code"]) == (400, "unsupported")
            assert "--share-prefixes" in answer["error"]["message"]
            assert len(warned) == 1
            assert "--share-prefixes" in warned[0]
        assert any("isolation (the server ignores cache_salt" in line for line in server.log)
        plain.shutdown()


async def test_leaving_ends_the_upstreams_generation(simulator: Server, tokenizer: Tokenizer) -> None:
    async with running_engine(simulator, tokenizer) as engine:
        chunks = engine.generate(request(tokenizer, max_tokens=1900, ignore_eos=True))
        await anext(chunks)
        assert await asyncio.to_thread(simulator.metric, "penstock_requests_running", role="worker") == 1
        await chunks.aclose()
        # That it was not its own end is what the upstream says of its client.
        await asyncio.to_thread(wait_until, lambda: simulator.metric("penstock_clients_left_total") == 1)
        await asyncio.to_thread(wait_until, lambda: simulator.metric("penstock_requests_running", role="worker") == 0)


def refuses(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0)).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


async def test_a_death_in_mid_answer_is_a_fault_that_others_can_mend(serve: Serve, tokenizer: Tokenizer) -> None:
    server = serve("--model", str(chat_model()), *SIMULATOR, model="upstream")
    supervisor, front_end = psutil.Process(server.process.pid), server.child("frontend")
    async with running_engine(server, tokenizer) as engine:
        chunks = engine.generate(request(tokenizer, max_tokens=1900, ignore_eos=True))
        await anext(chunks)
        # Whoever would start another one must not.
        supervisor.suspend()
        front_end.kill()
        try:
            with pytest.raises(EngineRefused) as caught:
                async for _ in chunks:
                    pass
            assert (caught.value.fault.code, caught.value.fault.retryable) == ("engine_lost", True)
            # A process that was killed closes its sockets a little later. Until then connections can be made.
            await asyncio.to_thread(wait_until, lambda: refuses(server.url))
            with pytest.raises(EngineDied):
                await read_all(engine, request(tokenizer))
        finally:
            supervisor.resume()


async def test_an_over_long_prompt_is_refused_in_the_upstreams_words(simulator: Server, tokenizer: Tokenizer) -> None:
    async with running_engine(simulator, tokenizer) as engine:
        with pytest.raises(EngineRefused, match="maximum context length is 2000 tokens") as caught:
            await read_all(engine, request(tokenizer, token_ids=(300,) * 3000))
        assert not caught.value.fault.retryable


async def test_a_real_models_text_and_a_grammar(serve: Serve, tokenizer: Tokenizer) -> None:
    """The embedded engine as the upstream: greedy text is the same by either route, and a grammar is kept to by the exact one."""
    server = serve("--model", str(chat_model()), *SIMULATOR[2:], "--threads", "1", engine="embedded", model="upstream")
    asked = request(tokenizer, sampling=GREEDY)
    expected = await asyncio.to_thread(directly, server, asked)
    async with running_engine(server, tokenizer) as engine:
        assert shown(tokenizer, await read_all(engine, asked)) == expected["text"]
    async with running_engine(server, tokenizer, "auto") as engine:
        chunks = await read_all(engine, asked)
        assert [token for chunk in chunks for token in chunk.token_ids] == expected["token_ids"]
        wished = await read_all(engine, request(tokenizer, lark='start: "yes" | "no"', sampling=GREEDY))
        assert shown(tokenizer, wished) in ("yes", "no")


@pytest.mark.parametrize("route", ["auto", "openai"])
async def test_the_whole_stack_before_the_upstream(simulator: Server, serve: Serve, tokenizer: Tokenizer, route: Route) -> None:
    """A front end, a worker, and behind it a server of another: clients see what they would see there."""
    arguments = ("--url", simulator.url, "--route", route, "--model", str(chat_model()), "--served-name", "behind")
    stack = await asyncio.to_thread(serve, *arguments, engine="http", model="behind")
    asks = [request(tokenizer, seed=seed, max_tokens=120) for seed in range(4)]
    for asked in asks:
        expected, seen = await asyncio.gather(*[asyncio.to_thread(directly, server, asked) for server in (simulator, stack)])
        assert (seen["text"], seen["finish_reason"]) == (expected["text"], expected["finish_reason"])
        if route == "auto":
            assert seen["token_ids"] == expected["token_ids"]
    said = "\n".join(stack.log)
    assert ("exact token ids" in said) == (route == "openai")


def test_the_doctor_knows(simulator: Server) -> None:
    command = [sys.executable, "-m", "penstock", "doctor", "--engine=http", "--url", simulator.url]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert "Penstock over HTTP" in told
    assert "exact token ids" in told
