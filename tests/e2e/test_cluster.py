"""Many workers as one service: streams that outlive their workers, sessions, several models, several front ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from chat_model import chat_model
from e2e.harness import Server, wait_until
from e2e.predicted import predicted
from redis_server import RedisServer

SESSIONS_GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "sessions.md"
CERTIFICATES = Path(__file__).parents[1] / "certificates"
SECRET = {"PENSTOCK_LINK_SECRET": "between the two of us"}


def workers_of(server: Server) -> list[psutil.Process]:
    return [child for child in psutil.Process(server.process.pid).children() if "worker" in child.cmdline()]


def stream_text(server: Server, seed: int, tokens: int, on_chunk: Callable[[int], None] = lambda _: None, **fields: Any) -> str:
    """The text of a whole stream; `on_chunk` is called with the number of each chunk."""
    stream = server.client.completions.create(
        model="simulator", prompt="x", max_tokens=tokens, seed=seed, stream=True, extra_body={"ignore_eos": True, **fields}
    )
    text = ""
    for number, chunk in enumerate(stream):
        text += "".join(choice.text for choice in chunk.choices)
        on_chunk(number)
    return text


def control(session: str, action: str | None = None, timeout: float = 60) -> dict[str, Any]:
    return {"nvext": {"session_control": {"session_id": session, "timeout": timeout, **({} if action is None else {"action": action})}}}


def ask(server: Server, messages: list[dict[str, str]], key: str = "none", headers: dict[str, str] | None = None, **extra: Any) -> Any:
    """One chat turn, appended to the messages with its answer. Returns the whole response."""
    client = server.client.with_options(api_key=key)
    answer = client.chat.completions.create(
        model=extra.pop("model", "simulator"),
        messages=messages,  # type: ignore[arg-type]
        max_tokens=40,
        seed=len(messages),
        extra_headers=headers,
        extra_body={"ignore_eos": True, **extra},
    )
    messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
    return answer


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Server]:
    """Three workers, for tests that break nothing."""
    server = Server("--workers", "3", "--step-ms", "2", "--session-grace", "1").wait_ready()
    yield server
    assert server.stop() == 0, server.log
    assert not [line for line in server.log if "ERROR" in line or "Traceback" in line], server.log


def test_killed_workers_are_not_noticed(serve: Callable[..., Server]) -> None:
    # Without trials: a kill of the worker on which a stream is tried would be taken for the work of that stream.
    server = serve("--workers", "3", "--step-ms", "10", "--trial-seconds", "0")

    def killing(number: int) -> None:
        if number in (20, 60):
            workers_of(server)[0].kill()

    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(stream_text, server, seed, 300, n=2) for seed in range(10, 40, 5)]
        assert stream_text(server, 1, 300, killing) == predicted(1, 300)
        for seed, other in zip(range(10, 40, 5), others, strict=True):
            assert sorted(other.result()) == sorted(predicted(seed, 300) + predicted(seed + 1, 300))
    assert server.metric("penstock_migrations_total", reason="worker_lost") >= 1


def test_the_only_worker_comes_back_and_goes_on(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "10")
    text = stream_text(server, 1, 200, lambda number: workers_of(server)[0].kill() if number == 20 else None)
    assert text == predicted(1, 200)
    assert any("worker-0 died (signal 9); restarting" in line for line in server.log)


def test_a_frozen_worker_is_left(serve: Callable[..., Server]) -> None:
    server = serve("--workers", "2", "--step-ms", "10", "--worker-stall", "0.5")
    frozen: list[psutil.Process] = []

    def freezing(number: int) -> None:
        if number == 10:
            busy = "worker-0" if server.metric("penstock_requests_running", role="worker", name="worker-0") else "worker-1"
            frozen.extend(process for process in workers_of(server) if f"--name={busy}" in process.cmdline())
            frozen[0].send_signal(signal.SIGSTOP)

    try:
        assert stream_text(server, 3, 200, freezing) == predicted(3, 200)
    finally:
        frozen[0].send_signal(signal.SIGCONT)
    assert server.metric("penstock_workers_stalled_total") == 1
    wait_until(lambda: server.metric("penstock_workers") == 2)


def test_usage_and_logprobs_survive_a_migration(serve: Callable[..., Server]) -> None:
    server = serve("--workers", "2", "--step-ms", "5")

    def run(breaks: bool) -> tuple[list[Any], Any]:
        stream = server.client.completions.create(
            model="simulator",
            prompt="one two three",
            max_tokens=120,
            seed=5,
            logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        logprobs: list[Any] = []
        for number, chunk in enumerate(stream):
            if breaks and number == 30:
                for process in workers_of(server):
                    process.kill()
            logprobs += [value for choice in chunk.choices if choice.logprobs for value in choice.logprobs.token_logprobs or []]
            usage = chunk.usage
        return logprobs, usage

    disturbed, usage = run(breaks=True)
    calm, same = run(breaks=False)
    assert disturbed == calm
    assert len(calm) == 120
    assert (usage.prompt_tokens, usage.completion_tokens) == (same.prompt_tokens, same.completion_tokens)


def test_a_session_over_http(cluster: Server) -> None:
    messages = [{"role": "user", "content": "tell me of rivers " * 40}]
    first = ask(cluster, messages, **control("rivers", "open")).nvext["session"]
    assert 50 < first.pop("retained_until") - time.time() <= 60
    told = {"id": "rivers", "state": "open", "worker": first["worker"], "cached_tokens": 0, "expires_in": 60.0, "tier": "device"}
    assert first == told
    for number in range(3):
        messages.append({"role": "user", "content": f"and then {number}"})
        answer = ask(cluster, messages, **control("rivers"))
        told = answer.nvext["session"]
        assert (told["state"], told["worker"]) == ("open", first["worker"])
        assert told["cached_tokens"] == cached(answer) > 0.9 * (answer.usage.prompt_tokens - 20)
    status, _, session = cluster.request("GET", "/v1/sessions/rivers", headers={"authorization": "Bearer none"})
    assert status == 200
    assert (session["worker"], session["turns"], session["active_turns"]) == (first["worker"], 4, 0)
    assert session["kv_blocks"] > 0
    assert session["kv_tokens"] == 16 * session["kv_blocks"]
    assert session["hit_rate"] > 0.5
    assert 0 < session["expires_in"] <= 60
    status, _, listed = cluster.request("GET", "/v1/sessions", headers={"authorization": "Bearer none"})
    assert [entry["id"] for entry in listed["data"]] == ["rivers"]
    for path in ("/v1/sessions/rivers", "/v1/sessions/nothing"):
        assert cluster.request("GET", path)[0] == 404, "another key does not have it"
        assert cluster.request("DELETE", path)[0] == 404
    status, _, gone = cluster.request("DELETE", "/v1/sessions/rivers", headers={"authorization": "Bearer none"})
    assert (status, gone) == (200, {"id": "rivers", "object": "session", "deleted": True})
    assert cluster.request("GET", "/v1/sessions/rivers", headers={"authorization": "Bearer none"})[0] == 404
    assert ask(cluster, messages, **control("rivers")).nvext["session"]["state"] == "unknown"
    wait_until(lambda: cluster.metric("penstock_sessions", name=first["worker"]) == 0)


def test_a_streamed_turn_tells_of_its_session_at_its_end(cluster: Server) -> None:
    stream = cluster.client.completions.create(
        model="simulator", prompt="x", max_tokens=20, stream=True, extra_body={"ignore_eos": True, **control("streamed", "open")}
    )
    chunks = list(stream)
    told: list[Any] = [(chunk.model_extra or {}).get("nvext") for chunk in chunks]
    assert told[-1]["session"]["state"] == "open"
    assert not any(told[:-1])
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ("rivers", "nvext.session_control"),
        ({}, "nvext.session_control.session_id"),
        ({"session_id": ""}, "nvext.session_control.session_id"),
        ({"session_id": "x" * 257}, "nvext.session_control.session_id"),
        ({"session_id": "x", "action": "reopen"}, "nvext.session_control.action"),
        ({"session_id": "x", "timeout": -1}, "nvext.session_control.timeout"),
        ({"session_id": "x", "timeout": 1e9}, "nvext.session_control.timeout"),
    ],
)
def test_malformed_sessions_name_the_field(cluster: Server, wrong: object, param: str) -> None:
    status, _, body = cluster.post("/v1/completions", prompt="x", nvext={"session_control": wrong})
    assert (status, body["error"]["param"]) == (400, param)


def test_the_headers_of_coding_agents_are_sessions(cluster: Server) -> None:
    main = [{"role": "user", "content": "a system prompt that is long enough to be cached " * 20}]
    names = {"x-claude-code-session-id": "abc"}
    first = ask(cluster, main, headers=names).nvext["session"]
    assert (first["id"], first["state"]) == ("abc", "open")
    child = ask(cluster, list(main), headers={**names, "x-claude-code-agent-id": "scout"}).nvext["session"]
    assert (child["id"], child["worker"]) == ("abc/scout", first["worker"])
    assert child["cached_tokens"] > 0, "it shares its parent's prefix"
    final = {**names, "x-claude-code-agent-id": "scout", "x-dynamo-session-final": "true"}
    only = ask(
        cluster, [{"role": "user", "content": "once and never again " * 20}], headers={"x-session-id": "single", "x-session-final": "1"}
    )
    assert only.nvext["session"]["state"] == ask(cluster, list(main), headers=final).nvext["session"]["state"] == "closed"
    wait_until(lambda: {each["id"] for each in listed(cluster)} == {"abc"})
    again = ask(cluster, [{"role": "user", "content": "once and never again " * 20}])
    assert cached(again) == 0, "it was freed at once"


def listed(server: Server) -> list[dict[str, Any]]:
    _, _, body = server.request("GET", "/v1/sessions", headers={"authorization": "Bearer none"})
    return [session for session in body["data"] if session["id"].startswith(("abc", "single"))]


def test_a_retained_prompt_over_http(cluster: Server) -> None:
    """The openai client's own fields. What was written is read the next time, by the same worker."""
    part = {"type": "text", "text": "the rules of the house " * 20, "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    messages: Any = [{"role": "system", "content": [part]}, {"role": "user", "content": "well " * 40}]
    asked: Any = {"model": "simulator", "max_tokens": 8, "prompt_cache_key": "house"}
    options: Any = {"prompt_cache_options": {"ttl": "30m"}}
    first = cluster.client.chat.completions.create(messages=messages, **asked, extra_body=options)
    total = first.usage.prompt_tokens
    long, short = first.model_extra["nvext"]["retained"]
    assert first.usage.prompt_tokens_details.cache_write_tokens == total // 16 * 16 == short["tokens"]
    assert 80 <= long["tokens"] < short["tokens"]
    assert [round((each["retained_until"] - time.time()) / 60) for each in (long, short)] == [720, 30]
    second = cluster.client.chat.completions.create(messages=messages, **asked, extra_body={"prompt_cache_retention": "24h"})
    details = second.usage.prompt_tokens_details
    assert (details.cached_tokens, details.cache_write_tokens) == ((total - 1) // 16 * 16, 0 if total % 16 else 16)
    answer: Any = cluster.client.responses.create(
        model="simulator",
        input="and now something else " * 20,
        max_output_tokens=8,
        store=False,
        extra_body={"prompt_cache_retention": "24h"},
    )
    details = answer.usage.input_tokens_details
    assert details.cached_tokens == 0
    assert details.cache_write_tokens == details.cache_write_tokens_details.ttl_12h_tokens == answer.usage.input_tokens // 16 * 16 > 0
    assert details.cache_write_tokens_details.ttl_30m_tokens == 0


def test_a_changing_billing_line_does_not_break_the_prefix(cluster: Server) -> None:
    reused = []
    for number in range(3):
        system = f"x-anthropic-billing-header: cc_version={number}; cch={number * 7}\n" + "keep to the rules of the house " * 30
        answer = ask(cluster, [{"role": "system", "content": system}, {"role": "user", "content": "well"}], prompt_cache_key="bill")
        reused.append(cached(answer) / answer.usage.prompt_tokens)
    assert reused[0] < 0.1
    assert min(reused[1:]) > 0.9


def test_the_route_is_told_when_asked_for(cluster: Server) -> None:
    prompt = "a prompt of its own that is routed by its prefix " * 20
    routes = []
    for _ in range(2):
        _, _, body = cluster.post("/v1/completions", prompt=prompt, max_tokens=4, nvext={"extra_fields": ["route"]})
        routes.append(body["nvext"]["route"])
    assert [len(route) for route in routes] == [1, 1]
    assert routes[0][0]["worker"] == routes[1][0]["worker"]
    assert (routes[1][0]["reason"], routes[1][0]["choice"]) == ("prefix", 0)
    assert routes[1][0]["overlap_blocks"] > 5
    body = json.dumps({"model": "simulator", "prompt": prompt, "max_tokens": 4, "nvext": {"extra_fields": ["route"]}}).encode()
    seen = [cluster.request("POST", "/v1/completions", body, {"x-penstock-router": "round-robin"})[2] for _ in range(3)]
    assert {answer["nvext"]["route"][0]["reason"] for answer in seen} == {"round_robin"}
    assert len({answer["nvext"]["route"][0]["worker"] for answer in seen}) == 3
    status, _, refused = cluster.request("POST", "/v1/completions", body, {"x-penstock-router": "best"})
    assert (status, refused["error"]["param"]) == (400, "x-penstock-router")
    assert cluster.metric("penstock_routing_decisions_total", reason="round_robin") >= 3


def test_a_full_queue_is_429_with_the_reason(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "20", "--max-batch", "1", "--worker-queue", "1", "--max-queued", "1")
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(stream_text, server, 0, 100)]
        wait_until(lambda: server.metric("penstock_requests_running", role="frontend") == 1)
        running.append(pool.submit(stream_text, server, 1, 100))
        wait_until(lambda: server.metric("penstock_requests_queued", role="worker") == 1)
        running.append(pool.submit(stream_text, server, 2, 100))
        wait_until(lambda: server.metric("penstock_generations_queued") == 1)
        status, headers, body = server.post("/v1/completions", prompt="x")
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert "at most 1 generations wait" in body["error"]["message"]
        assert headers["retry-after"] == "1"
        assert [future.result() for future in running] == [predicted(seed, 100) for seed in range(3)]


def start_worker(folder: Path, name: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "penstock", "worker", "--engine=simulator", f"--name={name}", f"--listen=unix:{folder}/{name}.sock"]
    return subprocess.Popen([*command, *arguments], env={**os.environ, **SECRET})


@pytest.fixture
def running() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that the test starts; ended afterwards."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.terminate()
    for process in processes:
        process.wait(30)


def test_a_worker_that_drains_hands_its_streams_over(
    serve: Callable[..., Server], running: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    running += [start_worker(tmp_path, name, "--step-ms=20", "--grace=0.3") for name in ("a", "b")]
    command = [sys.executable, "-m", "penstock", "frontend", "--port=0", *[f"--worker=unix:{tmp_path}/{name}.sock" for name in "ab"]]
    server = serve(command=command, environment=SECRET)

    def terminate(number: int) -> None:
        if number == 10:
            busy = 0 if server.metric("penstock_requests_running", role="worker", name="a") else 1
            running[busy].terminate()

    assert stream_text(server, 7, 100, terminate) == predicted(7, 100)
    assert server.metric("penstock_migrations_total", reason="draining") == 1
    assert [process.wait(20) for process in running if process.poll() is not None] == [0]


def test_links_between_machines_use_tls(serve: Callable[..., Server], running: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """Without a secret. The worker's log says nothing of links that are not encrypted; with a secret only, it does."""
    ports = free_ports(2)
    worker, front_end = (
        [f"--link-tls-cert={CERTIFICATES}/{name}.pem", f"--link-tls-key={CERTIFICATES}/{name}.pem", f"--link-tls-ca={CERTIFICATES}/ca.pem"]
        for name in ("worker", "front_end")
    )
    command = [sys.executable, "-m", "penstock", "worker", "--engine=simulator"]
    logs = [tmp_path / "tls.log", tmp_path / "open.log"]
    for port, flags, log in zip(ports, (worker, []), logs, strict=True):
        words = [*command, f"--name=on-{port}", f"--listen=tcp://0.0.0.0:{port}", *flags]
        with log.open("wb") as output:
            running.append(subprocess.Popen(words, stderr=output, env={**os.environ, **({} if flags else SECRET)}))
    command = [sys.executable, "-m", "penstock", "frontend", "--port=0"]
    secured = serve(command=[*command, f"--worker=tcp://127.0.0.1:{ports[0]}", *front_end])
    assert stream_text(secured, 7, 100) == predicted(7, 100)
    plain = serve(command=[*command, f"--worker=tcp://127.0.0.1:{ports[1]}"], environment=SECRET)
    assert stream_text(plain, 7, 100) == predicted(7, 100)
    assert "not encrypted: prompts and answers on the links of --listen" in logs[1].read_text()
    assert "not encrypted" not in logs[0].read_text()
    assert [line for line in plain.log if "the link is not encrypted" in line]
    assert not [line for line in secured.log if "not encrypted" in line]


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def test_the_front_end_needs_no_file_of_the_model(
    serve: Callable[..., Server], running: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """As on another machine: the worker's model directory is gone when the front end starts."""
    model, copy = tmp_path / "a model", tmp_path / "another place"
    shutil.copytree(chat_model(), model)
    shutil.copytree(chat_model(), copy)
    running.append(start_worker(tmp_path, "a", f"--model={model}", "--served-name=simulator"))
    wait_until((tmp_path / "a.sock").exists)
    shutil.rmtree(model)
    command = [sys.executable, "-m", "penstock", "frontend", "--port=0", f"--worker=unix:{tmp_path}/a.sock"]
    texts = []
    for number, given in enumerate(((), (f"--model={copy}",))):
        cache = tmp_path / f"cache-{number}"
        server = serve(*given, command=command, environment={**SECRET, "XDG_CACHE_HOME": str(cache)})
        texts.append(ask(server, [{"role": "user", "content": "water"}]).choices[0].message.content)
        _, _, told = server.request("GET", "/v1/models")
        assert str(tmp_path) not in json.dumps(told)
        assert cache.exists() == (not given), "what is on this machine is not fetched"
        server.stop()
    assert texts[0] == texts[1] != ""


def test_several_models_behind_one_front_end(serve: Callable[..., Server], running: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    running += [start_worker(tmp_path, "a", "--served-name=small"), start_worker(tmp_path, "b", "--served-name=large")]
    command = [sys.executable, "-m", "penstock", "frontend", "--port=0", "--worker-wait=1"]
    server = serve(command=[*command, *[f"--worker=unix:{tmp_path}/{name}.sock" for name in "ab"]], environment=SECRET)
    listed = {model.id: model.model_extra for model in server.client.models.list()}
    assert listed.keys() == {"small", "large"}
    details: Any = listed["small"]
    assert details["penstock"]["roles"] == ["aggregated"]
    assert "sessions" in details["penstock"]["capabilities"]
    for model, worker in (("small", "a"), ("large", "b")):
        asked = {"nvext": {"extra_fields": ["route"]}}
        answer: Any = server.client.completions.create(model=model, prompt="x", seed=1, extra_body=asked)
        assert answer.nvext["route"][0]["worker"] == worker
    running[0].kill()
    wait_until(lambda: [model.id for model in server.client.models.list()] == ["large"])
    with pytest.raises(openai.InternalServerError, match="no worker for model 'small' came within 1 s"):
        server.client.completions.create(model="small", prompt="x")
    assert server.client.completions.create(model="large", prompt="x", seed=2).choices[0].text == predicted(2, 16)


def test_two_front_ends_share_their_sessions_in_redis(
    serve: Callable[..., Server], running: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    with RedisServer() as redis:
        store = f"--store={redis.url}"
        running += [start_worker(tmp_path, name, store, "--step-ms=2") for name in "abc"]
        command = [sys.executable, "-m", "penstock", "frontend", "--port=0", store]
        servers = [serve(command=[*command, f"--name=front-{number}"], environment=SECRET) for number in range(2)]
        for server in servers:
            wait_until(lambda: server.metric("penstock_workers") == 3, timeout=30)  # noqa: B023
        for agent in range(6):
            messages = [{"role": "user", "content": f"agent {agent} " * 100}]
            home = ask(servers[0], messages, **control(f"agent-{agent}", "open")).nvext["session"]["worker"]
            for turn in range(1, 5):
                messages.append({"role": "user", "content": "go on"})
                told = ask(servers[turn % 2], messages, **control(f"agent-{agent}")).nvext["session"]
                assert (told["state"], told["worker"]) == ("open", home)
                assert told["cached_tokens"] > 200
        lists = [server.request("GET", "/v1/sessions", headers={"authorization": "Bearer none"})[2] for server in servers]
        assert [len(listed["data"]) for listed in lists] == [6, 6]
        redis.kill()
        wait_until(lambda: all(server.metric("penstock_store_available") == 0 for server in servers), timeout=20)
        for server in servers:
            assert server.client.completions.create(model="simulator", prompt="x", seed=2).choices[0].text == predicted(2, 16)
            assert ask(server, [{"role": "user", "content": "x"}], **control("meanwhile", "open")).choices
            assert len([line for line in server.log if "is lost" in line]) == 1
        redis.start()
        wait_until(lambda: all(server.metric("penstock_store_available") == 1 for server in servers), timeout=20)
        messages = [{"role": "user", "content": "back again " * 50}]
        home = ask(servers[0], messages, **control("after", "open")).nvext["session"]["worker"]
        told = ask(servers[1], messages, **control("after")).nvext["session"]
        assert (told["state"], told["worker"]) == ("open", home)
        running[0].terminate()
        assert running[0].wait(20) == 0
        wait_until(lambda: all(server.metric("penstock_workers") == 2 for server in servers), timeout=20)


def test_a_front_end_starts_without_its_redis(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve("--step-ms", "2", f"--store=unix://:hidden@{tmp_path}/nothing")
    assert server.metric("penstock_store_available") == 0
    assert ask(server, [{"role": "user", "content": "x"}], **control("alone", "open")).nvext["session"]["state"] == "open"
    assert ask(server, [{"role": "user", "content": "x"}], **control("alone")).nvext["session"]["state"] == "open"
    assert len([line for line in server.log if "is lost" in line]) == 1
    assert not [line for line in server.log if "hidden" in line]


def test_a_store_that_is_none_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "penstock", "frontend", "--port=0", "--store=http://example.com"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "--store http://example.com cannot be used: expected a redis://" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_session_is_tokenized_only_where_it_is_new(cluster: Server) -> None:
    messages = [{"role": "user", "content": "tell me of dams and turbines " * 30}]
    ask(cluster, messages, **control("tokens", "open"))
    messages.append({"role": "user", "content": "and of water"})
    before = {source: cluster.metric("penstock_chat_tokens_total", source=source) for source in ("encoded", "reused")}
    answer = ask(cluster, messages, **control("tokens"))
    encoded, reused = (cluster.metric("penstock_chat_tokens_total", source=source) - before[source] for source in ("encoded", "reused"))
    assert encoded + reused == answer.usage.prompt_tokens
    assert encoded < 40, "neither the first message nor the answer of 40 tokens is tokenized again"


def examples(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", SESSIONS_GUIDE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("number", range(len(examples("python"))))
def test_the_guides_python_runs_as_it_stands(cluster: Server, number: int) -> None:
    environment = {**os.environ, "PENSTOCK_URL": cluster.url}
    code = examples("python")[number]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "'deleted': True" in done.stdout or "'state': 'closed'" in done.stdout, done.stdout


@pytest.mark.skipif(shutil.which("jq") is None or shutil.which("curl") is None, reason="jq or curl is not installed")
def test_the_guides_shell_runs_as_it_stands(cluster: Server) -> None:
    environment = {**os.environ, "PENSTOCK_URL": cluster.url}
    for code in examples("bash"):
        command = ["bash", "-euo", "pipefail", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        assert '"state":"closed"' in done.stdout, done.stdout
