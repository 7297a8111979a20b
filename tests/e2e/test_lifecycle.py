"""Processes: draining, dying, restarting, and readers that are slow, stalled or gone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import openai
import psutil
import pytest

from e2e.harness import Server, wait_until
from e2e.predicted import predicted


def begin_stream(server: Server, receive_buffer: int | None = None, **fields: object) -> socket.socket:
    """Sends a streaming request on a socket of its own, and reads nothing."""
    body = json.dumps({"model": "simulator", "prompt": "x", "stream": True, **fields}).encode()
    return begin(server, "/v1/completions", body, receive_buffer)


def begin(server: Server, path: str, body: bytes, receive_buffer: int | None = None, method: str = "POST") -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    """Reads until the end of a stream, or of its connection, however that ends."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while not data.endswith(b"\r\n0\r\n\r\n"):
            piece = connection.recv(65536)
            if not piece:
                break
            data += piece
    return data


def text_of(response: bytes) -> str:
    events = [line[6:] for line in response.replace(b"\r\n", b"\n").split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def idle(server: Server) -> bool:
    """The worker has no request left, and its KV is back."""
    return (
        server.metric("penstock_requests_running", role="worker") == 0
        and server.metric("penstock_requests_queued", role="worker") == 0
        and server.metric("penstock_kv_blocks", state="used") == 0
    )


def test_clients_that_leave_are_gone_from_the_worker_at_once(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "20", "--max-batch", "40")
    generator = random.Random(1)
    connections = [begin_stream(server, max_tokens=100_000, ignore_eos=True) for _ in range(100)]
    wait_until(lambda: server.metric("penstock_requests_running", role="worker") == 40)
    assert server.metric("penstock_requests_queued", role="worker") == 60, "none would be cut off before its first token"
    # The front end hears of each first token a moment later, so the 40 are not running there at once.
    wait_until(lambda: server.metric("penstock_requests_running", role="frontend") == 40)
    assert server.metric("penstock_requests_queued", role="frontend") == 60
    generator.shuffle(connections)
    for connection in connections:
        connection.close()
    # Left alone, they would run for half an hour.
    wait_until(lambda: idle(server))
    assert server.metric("penstock_clients_left_total") == 100
    assert server.metric("penstock_requests_running", role="frontend") == 0


def test_a_non_streaming_client_that_leaves_is_gone_too(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "20")
    connection = begin_stream(server, max_tokens=100_000, ignore_eos=True, stream=False)
    wait_until(lambda: server.metric("penstock_requests_running", role="worker") == 1)
    connection.close()
    wait_until(lambda: idle(server))


def test_a_slow_reader_gets_everything_in_larger_events(serve: Callable[..., Server]) -> None:
    """It begins to read when all is made: its socket holds some hundred kilobytes of events, and the rest has become one."""
    tokens = 8000
    server = serve("--step-ms", "0.2")
    with begin_stream(server, receive_buffer=4096, max_tokens=tokens, ignore_eos=True, seed=3) as slow:
        wait_until(lambda: server.metric("penstock_requests_running", role="worker") == 1)
        wait_until(lambda: idle(server), timeout=60)
        response = read_to_end(slow)
    assert text_of(response) == predicted(3, tokens)
    assert response.count(b"data:") < tokens / 2
    assert b"[DONE]" in response


def test_a_reader_that_takes_nothing_is_cut_off(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "0.1", "--stall-timeout", "1")
    with begin_stream(server, receive_buffer=4096, max_tokens=100_000, ignore_eos=True, n=8) as stalled:
        wait_until(lambda: server.metric("penstock_readers_stalled_total") == 1, timeout=30)
        wait_until(lambda: idle(server))
        assert not read_to_end(stalled).endswith(b"0\r\n\r\n"), "it looks like a whole response"
    assert server.metric("penstock_requests_total", outcome="stalled") == 1
    assert not [line for line in server.log if "Traceback" in line]


def begin_whole(server: Server) -> socket.socket:
    """Asks for an answer of two megabytes at once, and reads nothing."""
    return begin_stream(server, receive_buffer=4096, stream=False, max_tokens=40_000, ignore_eos=True, n=8, seed=3)


def is_made_and_unread(server: Server) -> bool:
    return idle(server) and server.metric("penstock_requests_running", role="frontend") == 1


def test_a_whole_answer_is_inside_until_it_is_taken(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "0.1")
    with begin_whole(server) as connection:
        wait_until(lambda: server.metric("penstock_tokens_delivered_total") == 320_000, timeout=60)
        wait_until(lambda: is_made_and_unread(server))
        head, _, body = connection.recv(65536).partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        while len(body) < length:
            body += connection.recv(65536)
    assert json.loads(body)["choices"][0]["text"] == predicted(3, 40_000)
    wait_until(lambda: server.metric("penstock_requests_running", role="frontend") == 0)
    assert server.metric("penstock_requests_total", route="completions", outcome="ok") == 1


def test_a_client_that_leaves_an_answer_unread_is_counted_as_gone(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "0.1")
    with begin_whole(server):
        wait_until(lambda: server.metric("penstock_tokens_delivered_total") == 320_000, timeout=60)
        wait_until(lambda: is_made_and_unread(server))
    wait_until(lambda: server.metric("penstock_requests_running", role="frontend") == 0)
    assert server.metric("penstock_requests_total", route="completions", outcome="client_left") == 1
    assert server.metric("penstock_clients_left_total") == 1


def test_a_whole_answer_that_is_not_read_is_cut_off(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "0.1", "--stall-timeout", "1")
    tokens = json.dumps({"model": "simulator", "prompt": "x" * 300_000}).encode()
    with begin_whole(server) as made, begin(server, "/tokenize", tokens, receive_buffer=4096) as read:
        wait_until(lambda: server.metric("penstock_readers_stalled_total") == 2, timeout=60)
        for connection in (made, read):
            answer = read_to_end(connection)
            assert answer.startswith(b"HTTP/1.1 200")
            assert not answer.endswith(b"}"), "it looks like a whole answer"
    assert server.metric("penstock_requests_total", route="completions", outcome="stalled") == 1
    assert server.metric("penstock_requests_total", route="tokenize", outcome="stalled") == 1
    assert server.metric("penstock_requests_running", role="frontend") == 0
    assert not [line for line in server.log if "Traceback" in line]


def test_a_stored_stream_that_is_not_read_is_cut_off(serve: Callable[..., Server]) -> None:
    """All of its events are there when it is asked for."""
    server = serve("--step-ms", "0.1", "--stall-timeout", "1")
    fields = {"input": "x", "stream": True, "max_output_tokens": 20_000, "ignore_eos": True, "top_logprobs": 2}
    with begin(
        server, "/v1/responses", json.dumps({"model": "simulator", **fields, "include": ["message.output_text.logprobs"]}).encode()
    ) as made:
        events = read_to_end(made)
    stored = re.search(rb"resp_[0-9a-f]+", events)
    assert stored is not None
    assert len(events) > 2_000_000
    with begin(server, f"/v1/responses/{stored[0].decode()}?stream=true", b"", receive_buffer=4096, method="GET"):
        wait_until(lambda: server.metric("penstock_readers_stalled_total") == 1)
    assert server.metric("penstock_requests_total", route="response_get", outcome="stalled") == 1


def test_an_unread_answer_does_not_stay_in_the_buffers(serve: Callable[..., Server]) -> None:
    """It is taken as far as the server can see, but its client's kernel has no room for it."""
    server = serve("--stall-timeout", "0.5")
    body = json.dumps({"model": "simulator", "prompt": "x" * 10_000}).encode()
    with begin(server, "/tokenize", body, receive_buffer=2048) as connection:
        assert connection.recv(12) == b"HTTP/1.1 200"
        front_end, client = server.child("frontend"), connection.getsockname()[1]
        wait_until(lambda: not [each for each in front_end.net_connections() if each.raddr and each.raddr.port == client])
    assert server.metric("penstock_requests_total", route="tokenize", outcome="ok") == 1


def test_a_stream_that_no_worker_can_go_on_with_ends_in_an_error(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "20", "--worker-wait", "0")
    stream = iter(server.client.completions.create(model="simulator", prompt="x", max_tokens=5000, seed=1, stream=True))
    text = next(stream).choices[0].text
    server.child("worker").kill()
    with pytest.raises(openai.APIError, match="no worker for model 'simulator' came within 0 s"):
        for chunk in stream:
            text += chunk.choices[0].text
    assert predicted(1, 5000).startswith(text)
    wait_until(lambda: server.request("GET", "/ready")[0] == 200)
    assert server.client.completions.create(model="simulator", prompt="x", seed=2).choices[0].text == predicted(2, 16)
    assert any("worker-0 died (signal 9); restarting" in line for line in server.log)


def test_the_raw_end_of_a_broken_stream_is_an_error_and_no_done(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "20", "--worker-wait", "0")
    with begin_stream(server, max_tokens=5000) as connection:
        wait_until(lambda: server.metric("penstock_tokens_delivered_total") > 3)
        server.child("worker").kill()
        response = read_to_end(connection)
    assert b"[DONE]" not in response
    last = [line for line in response.split(b"\n") if line.startswith(b"data: ")][-1]
    assert json.loads(last[6:])["error"]["code"] == "no_worker"
    assert response.endswith(b"\r\n0\r\n\r\n"), "the response is complete as HTTP"


def test_sigterm_lets_what_runs_finish_and_exits_zero(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "10")
    with begin_stream(server, max_tokens=150, seed=8) as connection:
        wait_until(lambda: server.metric("penstock_requests_running", role="worker") == 1)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.request("GET", "/ready")[0] == 503)
        status, headers, body = server.post("/v1/completions", prompt="x")
        assert (status, body["error"]["code"]) == (503, "draining")
        assert headers["retry-after"]
        response = read_to_end(connection)
    assert text_of(response) == predicted(8, 150)
    assert b"[DONE]" in response
    assert server.join() == 0


def test_the_end_of_an_answer_is_sent_before_its_connection_is_cut(serve: Callable[..., Server]) -> None:
    """A request has ended when granian has its last bytes. Its client has the grace time to take them."""
    server = serve("--step-ms", "0.2")
    front_end = server.child("frontend")
    with begin_stream(server, receive_buffer=4096, max_tokens=8000, ignore_eos=True, logprobs=1, seed=8) as connection:
        wait_until(lambda: server.metric("penstock_requests_running", role="worker") == 1)
        wait_until(lambda: idle(server), timeout=60)
        response = b""
        while server.metric("penstock_requests_running", role="frontend"):
            response += connection.recv(4096)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(psutil.TimeoutExpired):
            front_end.wait(1)
        response += read_to_end(connection)
    assert text_of(response) == predicted(8, 8000)
    assert b"[DONE]" in response
    assert server.join() == 0


def test_a_worker_that_is_told_to_end_while_it_loads_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock", "worker", f"--listen=unix:{tmp_path}/w.sock"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        told = [next(line for line in worker.stderr if "loading" in line)]
        worker.terminate()
        told += worker.stderr
        assert worker.wait(30) == 0, told
    assert "stopped before the engine was loaded" in told[-1]
    assert not [line for line in told if "Traceback" in line or "is loaded after" in line]


def test_what_does_not_finish_within_the_grace_gets_a_fault(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "10", "--grace", "0.3")
    with begin_stream(server, max_tokens=100_000, ignore_eos=True) as connection:
        wait_until(lambda: server.metric("penstock_requests_running", role="worker") == 1)
        server.process.send_signal(signal.SIGTERM)
        response = read_to_end(connection)
    assert b'"code":"shutting_down"' in response
    assert server.join() == 0


def in_every_bad_state(server: Server) -> list[socket.socket]:
    """Connections of clients that do what a server cannot wait for."""
    endless = {"max_tokens": 100_000, "ignore_eos": True}
    resumable = begin_stream(server, **endless, stream_options={"resumable": True})
    resumable.recv(12)
    background = begin(server, "/v1/responses", json.dumps({"model": "simulator", "input": "x", "background": True}).encode())
    background.recv(12)
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
    _, half_head, half_body, kept_alive = connections
    half_head.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncont")
    half_body.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{"model":')
    kept_alive.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
    kept_alive.recv(12)
    # The third gets no place in the batch.
    unread = [begin_stream(server, receive_buffer=4096, n=8, **endless) for _ in range(3)]
    whole = begin(server, "/tokenize", json.dumps({"model": "simulator", "prompt": "x" * 300_000}).encode(), receive_buffer=4096)
    whole.recv(12)
    wait_until(lambda: server.metric("penstock_requests_running", role="frontend") >= 3)
    resumable.close()
    return [*connections, *unread, whole, background]


@pytest.mark.parametrize("again", [False, True], ids=["after the grace", "at a second signal"])
def test_sigterm_ends_a_front_end_whatever_its_clients_do(serve: Callable[..., Server], again: bool) -> None:
    server = serve("--step-ms", "1", "--max-batch", "20", "--worker-queue", "4", "--grace", "1000" if again else "0.5")
    front_end = server.child("frontend")
    connections = in_every_bad_state(server)
    front_end.terminate()
    if again:
        wait_until(lambda: server.request("GET", "/ready")[0] == 503)
        front_end.terminate()
        wait_until(lambda: any("a second signal: running requests are cut off now" in line for line in server.log))
    # Of its supervisor it is a child that died, so this process cannot ask for its status: the log tells it.
    wait_until(lambda: any("frontend has ended" in line for line in server.log), timeout=20)
    wait_until(lambda: not front_end.is_running())
    status = 128 + signal.SIGTERM if again else 0
    wait_until(lambda: any(f"frontend died (exit status {status})" in line for line in server.log))
    assert not [line for line in server.log if "Traceback" in line]
    for connection in connections:
        connection.close()


def test_serve_ends_with_its_children_whatever_its_clients_do(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "1", "--max-batch", "20", "--grace", "0.5")
    children = psutil.Process(server.process.pid).children()
    sockets = Path(next(word for word in server.child("worker").cmdline() if word.startswith("--listen=unix:")).partition(":")[2]).parent
    connections = in_every_bad_state(server)
    assert sockets.exists()
    assert server.stop() == 0
    assert any("frontend has ended" in line for line in server.log), "it was killed, without its clean-up"
    assert any("worker-0 has ended" in line for line in server.log)
    assert not [child for child in children if child.is_running()]
    assert not sockets.exists()
    for connection in connections:
        connection.close()


def test_ctrl_c_drains_and_a_second_one_exits_now(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "10")
    children = psutil.Process(server.process.pid).children()
    assert len(children) == 2
    with begin_stream(server, max_tokens=100_000, ignore_eos=True):
        wait_until(lambda: server.metric("penstock_requests_running", role="worker") == 1)
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: any("again to stop now" in line for line in server.log))
        assert server.process.poll() is None
        assert server.stop(signal.SIGINT, timeout=5) == 130
    assert not [child for child in children if child.is_running()]


def test_children_do_not_outlive_a_killed_supervisor(serve: Callable[..., Server]) -> None:
    server = serve()
    children = psutil.Process(server.process.pid).children()
    server.process.kill()
    server.join()
    psutil.wait_procs(children, timeout=10)
    assert not [child for child in children if child.is_running()]


def test_every_child_says_what_it_is(server: Server) -> None:
    assert "worker" in server.child("worker").cmdline()
    assert "--name=worker-0" in server.child("worker").cmdline()
    assert "frontend" in server.child("frontend").cmdline()


def test_a_port_in_use_is_told_once(server: Server) -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--engine", "simulator", "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert f"penstock: cannot listen on --host 127.0.0.1 --port {server.port}: Address already in use" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--workers", "0"], "--workers is 0: expected 1 or more"),
        (["serve", "--port", "70000"], "--port is 70000: expected 0 to 65,535"),
        (["serve", "--step-ms", "-1"], "--step-ms is -1: expected 0 or more"),
        (["serve", "--model", "/nowhere"], "--model /nowhere"),
        (["worker", "--engine", "simulator", "--listen", "nowhere"], "expected unix:/path or tcp://host:port"),
        (["worker", "--engine", "simulator", "--listen", "tcp://127.0.0.1:0"], "a worker on TCP needs PENSTOCK_LINK_SECRET or TLS"),
        # Found out when the engine already runs, which has to end as well.
        (["worker", "--listen", "unix:/nowhere/at/all.sock"], "--listen unix:/nowhere/at/all.sock: No such file or directory"),
    ],
)
def test_bad_settings_are_named(arguments: list[str], says: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_LINK_SECRET"}
    command = [sys.executable, "-m", "penstock", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environment)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_two_workers_share_the_load(serve: Callable[..., Server]) -> None:
    server = serve("--workers", "2", "--step-ms", "20")
    with begin_stream(server, n=10, max_tokens=100_000, ignore_eos=True):
        wait_until(lambda: server.metric("penstock_requests_running", role="worker", name="worker-0") == 5)
        wait_until(lambda: server.metric("penstock_requests_running", role="worker", name="worker-1") == 5)
        assert server.metric("penstock_workers") == 2


def test_a_worker_and_a_front_end_of_their_own_over_tcp(serve: Callable[..., Server], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    secret = {"PENSTOCK_LINK_SECRET": "between the two of us"}
    base = [sys.executable, "-m", "penstock"]
    worker = subprocess.Popen(
        [*base, "worker", "--engine=simulator", "--listen", f"tcp://127.0.0.1:{port}", "--step-ms", "1"], env={**os.environ, **secret}
    )
    try:
        command = [*base, "frontend", "--port", "0", "--worker", f"tcp://127.0.0.1:{port}"]
        front_end = serve(command=command, environment=secret)
        assert front_end.client.completions.create(model="simulator", prompt="x", seed=1).choices[0].text == predicted(1, 16)
        assert front_end.stop() == 0
        stranger = Server(command=command, environment={"PENSTOCK_LINK_SECRET": "a guess"})
        try:
            wait_until(lambda: any("handshake_refused" in line for line in stranger.log), timeout=20)
        finally:
            assert stranger.stop() == 0
    finally:
        worker.terminate()
        assert worker.wait(20) == 0


def test_without_file_descriptors_connections_are_refused_clearly(serve: Callable[..., Server]) -> None:
    limit = 200
    command = [
        "prlimit",
        f"--nofile={limit}:{limit}",
        sys.executable,
        "-m",
        "penstock",
        "serve",
        "--engine=simulator",
        "--port",
        "0",
        "--step-ms",
        "5",
    ]
    server = serve(command=command)
    assert resource.prlimit(server.child("frontend").pid, resource.RLIMIT_NOFILE) == (limit, limit)
    connections = [begin_stream(server, max_tokens=2000) for _ in range(250)]
    first = [connection.recv(12) for connection in connections]
    refused = [connection for connection, start in zip(connections, first, strict=True) if start == b"HTTP/1.1 503"]
    served = [connection for connection, start in zip(connections, first, strict=True) if start == b"HTTP/1.1 200"]
    assert len(refused) + len(served) == 250
    assert len(served) >= limit - 100
    assert refused
    answers = [read_to_end(connection) for connection in refused]
    assert [answer for answer in answers if b"no file descriptor for another connection (limit 200)" not in answer] == []
    assert b"retry-after: 1" in answers[0]
    for connection in connections:
        connection.close()
    wait_until(lambda: any("file descriptors are available again" in line for line in server.log))
    assert server.client.completions.create(model="simulator", prompt="x", seed=1).choices[0].text == predicted(1, 16)
    assert server.metric("penstock_connections_refused_total") >= len(refused)


def test_the_soft_limit_of_files_is_raised(server: Server) -> None:
    soft, hard = resource.prlimit(server.child("frontend").pid, resource.RLIMIT_NOFILE)
    assert soft == hard


def test_code_in_the_working_directory_is_not_loaded(serve: Callable[..., Server], tmp_path: Path) -> None:
    """The `penstock` command does not load it; nor may the processes that it starts."""
    (tmp_path / "msgspec.py").write_text('raise SystemExit("loaded from the working directory")')
    command = ["env", "-C", str(tmp_path), sys.executable, "-P", "-m", "penstock", "serve", "--port", "0", "--engine", "simulator"]
    assert serve(command=command).stop() == 0
