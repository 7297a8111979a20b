"""Every route to the real engines' own servers: `--engine vllm` or `--engine sglang` starts them, where they are installed.

The judge is what the same server answers at once to the same question, by the route that was not written for streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from chat_model import END_ID, chat_model, greedy, random_prompt
from contract.backends.setups import SETUPS
from cpu_engines import sglang_flags, vllm_flags
from penstock.backends.external.engine import Chunk, EngineFacts, EngineRefused, EngineRequest
from penstock.backends.http.engine import HttpEngine
from penstock.config.engines import HttpEngineSettings
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.wire.messages import Sampling

START_SECONDS = 400
CONTEXT = 2048
MOST_RUNNING = 8
GREEDY = Sampling(temperature=0.0)

pytestmark = [pytest.mark.timeout(START_SECONDS + 300), pytest.mark.filterwarnings("ignore:::(?!penstock)")]


@dataclass(frozen=True)
class Kind:
    """A server as it is started, and the route that must be found."""

    engine: str
    path: str
    flags: tuple[str, ...]


VLLM = vllm_flags(2**26, MOST_RUNNING)
SGLANG = (
    *sglang_flags(2**14, MOST_RUNNING),
    *("--grammar-backend", "llguidance", "--enable-session-radix-cache", "--radix-eviction-policy", "priority"),
)
KINDS = {
    "vllm-tokens": Kind("vllm", "/inference/v1/generate", (*VLLM, "--enable-scale-out")),
    "vllm-completions": Kind("vllm", "/v1/completions", VLLM),
    "sglang-cumulative": Kind("sglang", "/generate", SGLANG),
    "sglang-incremental": Kind("sglang", "/generate", (*SGLANG, "--incremental-streaming-output")),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "running" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("engine") or ()
        needs = pytest.param(None, marks=pytest.mark.skip(reason="an engine's own server: --engine vllm or sglang, where it is installed"))
        kinds: list[Any] = [name for name in KINDS if KINDS[name].engine in wanted] or [needs]
        metafunc.parametrize("running", kinds, indirect=True, scope="module")


class Running:
    """An engine's own server, in processes of its own."""

    def __init__(self, kind: Kind, directory: Path | None = None) -> None:
        """`directory`: another model than that of these tests."""
        self.kind = kind
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        model, address = str(directory or chat_model()), ("--host", "127.0.0.1", "--port", str(port))
        if kind.engine == "vllm":
            command = ["-m", "vllm.entrypoints.cli.main", "serve", model, "--max-model-len", str(CONTEXT)]
        else:
            command = ["-m", "sglang.launch_server", "--model-path", model, "--context-length", str(CONTEXT)]
        setup = SETUPS[kind.engine]
        paths = [str(setup.import_path)] if setup.import_path is not None else []
        paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        environment = {**os.environ, **setup.environment, "PYTHONPATH": os.pathsep.join(paths)}
        self.log = tempfile.TemporaryFile()  # noqa: SIM115, it is closed in `stop`
        self._process = subprocess.Popen(
            [sys.executable, *command, *address, *kind.flags], stdout=self.log, stderr=self.log, env=environment, start_new_session=True
        )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self._process.poll() is None, self.told()
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def told(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-5000:]

    def post(self, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode()
        asked = urllib.request.Request(f"{self.url}{path}", data, {"content-type": "application/json"})
        with urllib.request.urlopen(asked, timeout=120) as response:
            return json.load(response)

    def directly(self, asked: EngineRequest) -> list[int]:
        """The tokens that the server itself answers, all at once."""
        if self.kind.engine == "sglang":
            sampling = {"max_new_tokens": asked.max_tokens, "temperature": 0, "ignore_eos": asked.ignore_eos}
            made = self.post("/generate", input_ids=asked.token_ids, sampling_params=sampling)
            return list(made["output_ids"])
        fields = {"max_tokens": asked.max_tokens, "temperature": 0, "ignore_eos": asked.ignore_eos}
        made = self.post("/v1/completions", prompt=asked.token_ids, return_token_ids=True, **fields)
        return list(made["choices"][0]["token_ids"])

    def running_requests(self) -> int:
        """How many the engine computes now, by its own account."""
        if self.kind.engine == "sglang":
            with urllib.request.urlopen(f"{self.url}/v1/loads", timeout=30) as response:
                loads = json.load(response)["loads"]
            return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
        return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names)))

    def stop(self) -> None:
        family = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        self._process.terminate()
        _, alive = psutil.wait_procs(family, timeout=20)
        for process in alive:
            process.kill()
        self._process.wait(20)
        self.log.close()


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    server = Running(KINDS[request.param])
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


@contextlib.asynccontextmanager
async def running_engine(server: Running) -> AsyncIterator[tuple[HttpEngine, EngineFacts]]:
    engine = HttpEngine(HttpEngineSettings(server.url), pack_tokenizer(chat_model()).load())
    facts = await engine.start(lambda reason: pytest.fail(reason))
    try:
        yield engine, facts
    finally:
        await engine.close()


def ask(**fields: Any) -> EngineRequest:
    given = {"id": secrets.token_hex(16), "token_ids": random_prompt(1, 40), "max_tokens": 20, "seed": 1, "sampling": GREEDY, **fields}
    return EngineRequest(**given)


async def read_all(engine: HttpEngine, asked: EngineRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(asked)]


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def test_the_route_and_what_is_known(running: Running) -> None:
    async with running_engine(running) as (engine, facts):
        assert (engine.report.features[0].name, engine.report.features[0].is_available) == ("exact token ids", True)
        assert engine.report.features[0].detail.startswith(running.kind.path)
        assert engine.report.version is not None
        assert facts.block_size == 32
        assert facts.kv_blocks > 0
        assert facts.capabilities == ("logprobs", "prompt_logprobs", "grammar", "isolation")
        # What SGLang keeps back is not promised.
        assert facts.context_length == (2046 if running.kind.engine == "sglang" else CONTEXT)


async def test_the_tokens_are_the_servers_own(running: Running) -> None:
    asks = [ask(token_ids=random_prompt(seed, 20 + seed), max_tokens=40, ignore_eos=True) for seed in range(12)]
    async with running_engine(running) as (engine, _):
        answers = await asyncio.gather(*[read_all(engine, asked) for asked in asks])
    expected = await asyncio.gather(*[asyncio.to_thread(running.directly, asked) for asked in asks])
    assert list(map(tokens, answers)) == expected
    assert [[chunk.finish for chunk in chunks if chunk.finish] for chunks in answers] == [["length"]] * len(asks)
    assert tokens(answers[0]) == greedy(chat_model(), asks[0].token_ids, 40)


async def test_the_server_shares_nothing_between_salts(running: Running) -> None:
    prompt = random_prompt("salted", 300)
    async with running_engine(running) as (engine, facts):
        assert "isolation" in facts.capabilities
        found = []
        for salt in ("0a" * 16, "0a" * 16, "0b" * 16, None, "0b" * 16):
            chunks = await read_all(engine, ask(token_ids=prompt, max_tokens=2, salt=salt))
            found.append(chunks[-1].cached_tokens)
    # vLLM's server reports them only where it was told to.
    again = found[1]
    if again is not None:
        assert found == [0, again, 0, 0, again]
        assert again >= 256


async def test_a_reader_that_stalls_loses_nothing(running: Running) -> None:
    asked = ask(max_tokens=150, ignore_eos=True)
    expected = await asyncio.to_thread(running.directly, asked)
    async with running_engine(running) as (engine, _):
        chunks = engine.generate(asked)
        seen = [await anext(chunks)]
        # It computes on, and is done, before anybody reads again.
        while await asyncio.to_thread(running.running_requests):
            await asyncio.sleep(0.1)
        seen += [chunk async for chunk in chunks]
    assert tokens(seen) == expected


async def test_the_end_and_other_stops(running: Running) -> None:
    plain = ask(max_tokens=12, ignore_eos=True)
    async with running_engine(running) as (engine, _):
        made = tokens(await read_all(engine, plain))
        stop = next(token for place, token in enumerate(made) if place > 2 and made.index(token) == place)
        expected = made[: made.index(stop) + 1]
        for ignored in (False, True):
            chunks = await read_all(engine, ask(max_tokens=12, stop_ids=(stop,), ignore_eos=ignored))
            assert (tokens(chunks), chunks[-1].finish) == (expected, "stop")
        forced = await read_all(engine, ask(logit_bias=((END_ID, 100.0),)))
        assert (tokens(forced), forced[-1].finish) == ([END_ID], "stop")


async def test_logprobs_of_tokens_and_prompt(running: Running) -> None:
    async with running_engine(running) as (engine, _):
        streamed = await read_all(engine, ask(logprobs=3))
        whole = await read_all(engine, ask(logprobs=3, prompt_logprobs=True))
        none = await read_all(engine, ask(logprobs=0, max_tokens=3))
        sampled = await read_all(engine, ask(logprobs=2, max_tokens=40, sampling=Sampling(temperature=2.0)))
    entries = [entry for chunk in streamed for entry in chunk.logprobs or ()]
    assert len(entries) == len(tokens(streamed)) == 20
    for token, entry in zip(tokens(streamed), entries, strict=True):
        assert len(entry.top) == 3
        assert entry.top[0] == (token, entry.logprob)
        assert sorted((logprob for _, logprob in entry.top), reverse=True) == [logprob for _, logprob in entry.top]
    assert tokens(whole) == tokens(streamed)
    (only,) = whole
    assert only.prompt_logprobs is not None
    assert only.prompt_logprobs[0] is None
    assert [None if entry is None else len(entry.top) for entry in only.prompt_logprobs] == [None, *[3] * 39]
    assert all(entry.top == () for chunk in none for entry in chunk.logprobs or ())
    # Where another token was drawn, the likeliest are told all the same.
    unlikely = [entry for chunk in sampled for entry in chunk.logprobs or () if entry.logprob < entry.top[-1][1]]
    assert unlikely
    assert all(len(entry.top) == 2 for entry in unlikely)


async def test_a_grammar_is_kept_to(running: Running) -> None:
    tokenizer = pack_tokenizer(chat_model()).load()
    lark, allowed = 'start: "yes" | %json {"enum": ["left", "right"]}', {"yes", '"left"', '"right"'}
    async with running_engine(running) as (engine, _):
        free = await read_all(engine, ask(max_tokens=30))
        assert tokenizer.decode(tokens(free)) not in allowed
        chunks = await read_all(engine, ask(lark=lark, max_tokens=30))
        assert tokenizer.decode(tokens(chunks)) in allowed
        assert chunks[-1].finish == "stop"
        with pytest.raises(EngineRefused) as caught:
            await read_all(engine, ask(lark="start: nothing_like_it"))
        assert not caught.value.fault.retryable


def _has_ended(waiting: asyncio.Future[Chunk], _: int) -> bool:
    return waiting.done()


async def test_leaving_ends_it_there_begun_or_not(running: Running) -> None:
    """The engine's account comes late on a busy machine, perhaps after all have ended by themselves. Then it is tried again."""
    seen: list[int] = []

    async def until(count: int, *, is_over: Callable[[int], object] = lambda _: False) -> bool:
        deadline = time.monotonic() + 60
        while (now := await asyncio.to_thread(running.running_requests)) != count:
            seen.append(now)
            assert time.monotonic() < deadline, (count, seen)
            if is_over(now):
                return False
            await asyncio.sleep(0.05)
        return True

    long = {"max_tokens": 1900, "ignore_eos": True}
    async with running_engine(running) as (engine, _):
        for _ in range(10):
            begun = [engine.generate(ask(**long)) for _ in range(MOST_RUNNING)]
            await asyncio.gather(*map(anext, begun))
            # So many run at once: one more has to wait.
            last = engine.generate(ask(**long))
            waiting = asyncio.ensure_future(anext(last))
            was_seen = await until(MOST_RUNNING + 1, is_over=partial(_has_ended, waiting))
            waiting.cancel()
            await asyncio.wait([waiting])
            if was_seen:
                assert waiting.cancelled()
                was_seen = await until(MOST_RUNNING, is_over=lambda now: now < MOST_RUNNING)
            elif not waiting.cancelled():
                assert waiting.result().token_ids, "the waiting one ended without a token"
            for chunks in (*begun, last):
                await chunks.aclose()
            await until(0)
            if was_seen:
                return
        pytest.fail(f"{MOST_RUNNING + 1} and then {MOST_RUNNING} at once were never seen: {seen}")


async def test_refusals_are_in_the_engines_words(running: Running) -> None:
    async with running_engine(running) as (engine, _):
        overlong, wrong = ask(token_ids=random_prompt(2, 3000)), ask(sampling=Sampling(presence_penalty=5.0))
        for refused, code in ((overlong, "context_length_exceeded"), (wrong, "engine_refused")):
            with pytest.raises(EngineRefused) as caught:
                await read_all(engine, refused)
            assert caught.value.fault.code == code
            assert not caught.value.fault.retryable
        assert len(tokens(await read_all(engine, ask(max_tokens=3, ignore_eos=True)))) == 3


async def test_a_full_context_is_used_to_its_end(running: Running) -> None:
    async with running_engine(running) as (engine, facts):
        asked = ask(token_ids=random_prompt(3, facts.context_length - 30), max_tokens=30, ignore_eos=True)
        chunks = await read_all(engine, asked)
        assert (len(tokens(chunks)), chunks[-1].finish) == (30, "length")


async def test_sessions_and_pings(running: Running) -> None:
    async with running_engine(running) as (engine, _):
        await engine.ping()
        prompt = random_prompt(4, 100)
        first = await read_all(engine, ask(token_ids=prompt, session_id="a" * 32, session_seconds=60.0))
        again = await read_all(engine, ask(token_ids=prompt, session_id="a" * 32))
        assert tokens(first) == tokens(again)
        if running.kind.engine == "sglang":
            assert (first[0].cached_tokens, again[0].cached_tokens) == (0, 96)
        await engine.close_session("a" * 32)
        await engine.close_session("b" * 32)
