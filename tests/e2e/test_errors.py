"""Bad input gets a clear error that names the field; nothing is lost, nothing hangs, nothing else is hurt."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from typing import Any

import openai
import pytest

from e2e.harness import Server
from e2e.predicted import predicted

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": 5}, "prompt", "`prompt` is 5"),
        ({"prompt": []}, "prompt", "at least one prompt"),
        ({"prompt": ""}, "prompt", "needs at least one"),
        ({"prompt": ["a", 5]}, "prompt[1]", "`prompt[1]` is 5"),
        ({"prompt": [1, "a"]}, "prompt[1]", '`prompt[1]` is "a"'),
        ({"prompt": [[1], [True]]}, "prompt[1]", "`prompt[1]` is [true]"),
        ({"prompt": [1, 99999]}, "prompt[1]", "expected a token id from 0 to"),
        ({"prompt": [[1], [-1]]}, "prompt[1][0]", "`prompt[1][0]` is -1"),
        ({"prompt": "x", "max_tokens": "ten"}, "max_tokens", '`max_tokens` is "ten": expected `int'),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens", "`max_tokens` is -1: expected `int` >= 0"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1 unless `echo`"),
        ({"prompt": "x", "n": 0}, "n", "`n` is 0: expected `int` >= 1"),
        ({"prompt": ["x"] * 100, "n": 128}, "n", "more than 2048 choices"),
        ({"prompt": "x", "temperature": 3}, "temperature", "`temperature` is 3"),
        ({"prompt": "x", "stop": [""]}, "stop[0]", '`stop[0]` is ""'),
        ({"prompt": "x", "logprobs": 9}, "logprobs", "`logprobs` is 9: expected `int` <= 5"),
        ({"prompt": "x", "min_tokens": 20}, "min_tokens", "expected at most `max_tokens`"),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "needs `stream`"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "`suffix` is not supported by simulator"),
        ({"prompt": "x", "best_of": 2, "n": 3}, "best_of", "`best_of` is 2: expected at least `n`, which is 3"),
        ({"prompt": "x", "logit_bias": {"50000": 1}}, "logit_bias.50000", "expected a token id from 0 to"),
        ({"prompt": "x", "stop_token_ids": [1, -1]}, "stop_token_ids[1]", "`stop_token_ids[1]` is -1"),
        ({"prompt": "x", "structured_outputs": {"choice": []}}, "structured_outputs.choice", "length >= 1"),
        ({"prompt": "x", "structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "expected exactly one of"),
        ({"prompt": "x", "structured_outputs": {"regex": "a+"}}, "structured_outputs", "the simulator has no grammar"),
        ({"prompt": "x", "temprature": 1}, "temprature", "unknown field `temprature`"),
        ({}, "prompt", "`prompt` is required"),
        (
            {"prompt": "word " * 5000},
            "prompt",
            "context length is 4096 tokens. However, your prompt resulted in",
        ),
        ({"prompt": "x" * 100_000}, "prompt", "at least"),
        ({"prompt": "x", "max_tokens": 4096}, "prompt", "4096 in the completion"),
    ],
)
def test_completions(server: Server, fields: dict[str, Any], param: str, says: str) -> None:
    status, _, body = server.post("/v1/completions", **fields)
    assert status == 400
    assert body["error"]["param"] == param
    assert says in body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "expected one of system, developer, user, assistant"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages[0].content[0]",
            "images are not supported",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "poem"}]}]}, "messages[0].content[0].type", "expected one of text"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({**CHAT, "functions": [{}]}, "functions", "`functions` is not supported yet"),
        ({**CHAT, "response_format": {"type": "xml"}}, "response_format.type", "expected one of text, json_object, json_schema"),
        ({**CHAT, "response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({**CHAT, "response_format": {"type": "json_object"}}, "response_format", "the simulator has no grammar"),
        ({**CHAT, "response_format": {"type": "json_object"}, "stream": True}, "response_format", "the simulator has no grammar"),
        (
            {**CHAT, "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "cannot be combined",
        ),
        ({**CHAT, "top_logprobs": 3}, "top_logprobs", "needs `logprobs`"),
        ({**CHAT, "max_completion_tokens": 0}, "max_tokens", "at least 1"),
        (
            {"messages": [{"role": "user", "content": "word " * 5000}]},
            "messages",
            "length is 4096 tokens. However, your messages resulted in",
        ),
    ],
)
def test_chat(server: Server, fields: dict[str, Any], param: str, says: str) -> None:
    status, _, body = server.post("/v1/chat/completions", **fields)
    assert status == 400
    assert body["error"]["param"] == param
    assert says in body["error"]["message"]


def test_null_means_left_out(server: Server) -> None:
    status, _, _ = server.post("/v1/completions", prompt="x", suffix=None, max_tokens=None, stop=None, logit_bias=None)
    assert status == 200


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model":"simulator","prompt":"x"}}', "invalid_json"),
        (b"[1]", "invalid_type"),
        (b'{"model":"simulator","prompt":"\xff\xfe"}', "invalid_utf8"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"model":"simulator","prompt":5,"stop":\xde"a"}', "invalid_json"),
        (b'{"model":5,"prompt":"\xff"}', "invalid_utf8"),
        (b'{"model":"simulator","prompt":' + b"[" * 100_000, "invalid_json"),
    ],
)
def test_bodies_that_are_no_request(server: Server, body: bytes, code: str) -> None:
    status, _, answer = server.request("POST", "/v1/completions", body)
    assert status == 400
    assert answer["error"]["code"] == code


def test_an_unknown_model(server: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="this server has `simulator`") as caught:
        server.client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.param == "model"
    assert caught.value.code == "model_not_found"


def test_errors_come_before_the_stream_begins(server: Server) -> None:
    with pytest.raises(openai.BadRequestError):
        server.client.completions.create(model="simulator", prompt="x", max_tokens=-1, stream=True)


def test_unknown_paths_and_methods(server: Server) -> None:
    assert server.request("GET", "/v2/what")[0] == 404
    assert server.request("GET", "/v2/what")[2]["error"]["code"] == "not_found"
    status, _, body = server.request("GET", "/v1/completions")
    assert (status, body["error"]["message"]) == (405, "/v1/completions takes POST, not GET")


def test_a_websocket_is_refused_so_that_the_client_takes_http(server: Server) -> None:
    """Codex asks for one first. After 426 it goes on over HTTP at once."""
    asked = {
        "connection": "Upgrade",
        "upgrade": "WebSocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "bm9uY2U=",
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("GET", "/v1/responses", headers=asked)
        answer = connection.getresponse()
        assert (answer.status, answer.headers["allow"]) == (426, "POST")
        assert json.loads(answer.read())["error"]["code"] == "upgrade_required"
        # The connection can still be used.
        connection.request("GET", "/v1/responses")
        assert connection.getresponse().status == 405
    finally:
        connection.close()


def test_a_body_over_the_limit_is_refused_before_it_is_read(serve: Any) -> None:
    server: Server = serve("--max-body-bytes", "1000", "--step-ms", "1")
    status, _, body = server.post("/v1/completions", prompt="x" * 2000)
    assert status == 413
    assert body["error"]["message"] == "the body is over the limit of 1,000 bytes"
    # Without a length announced, it is refused as soon as it is over.
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n")
        connection.sendall(b"7d0\r\n" + b"x" * 2000 + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")
    assert server.client.completions.create(model="simulator", prompt="x", seed=1).choices[0].text == predicted(1, 16)


def test_a_body_that_never_comes_is_given_up(serve: Any) -> None:
    server: Server = serve("--stall-timeout", "0.3")
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n\r\n{")
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")


def test_too_many_generations_get_429(serve: Any) -> None:
    server: Server = serve("--max-generations", "3", "--step-ms", "20")
    stream = server.client.completions.create(model="simulator", prompt="x", n=3, max_tokens=2000, stream=True)
    next(iter(stream))
    status, headers, body = server.post("/v1/completions", prompt="x")
    assert status == 429
    assert headers["retry-after"]
    assert body["error"]["message"] == "the server is full; its limit is 3 generations at once"
    stream.close()


def test_more_than_the_kv_cache_holds_is_refused_with_the_reason(serve: Any) -> None:
    server: Server = serve("--kv-blocks", "10", "--step-ms", "1")
    for stream in (False, True):
        status, _, body = server.post("/v1/completions", prompt="x", max_tokens=1000, stream=stream)
        assert status == 400
        assert "needs 63 KV pages and the worker has 10" in body["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_compressed_body(server: Server, path: str) -> None:
    body = gzip.compress(json.dumps({"model": "simulator", "prompt": "x " * 500}).encode())
    assert server.request("POST", path, body, {"content-encoding": "gzip"})[0] == 200
    bomb = gzip.compress(bytes(40 * 2**20))
    for sent, encoding, status, code in (
        (bomb, "gzip", 413, "body_too_large"),
        (body[:-5], "gzip", 400, "invalid_encoding"),
        (body, "br", 415, "unsupported_encoding"),
    ):
        answer = server.request("POST", path, sent, {"content-encoding": encoding})
        assert (answer[0], answer[2]["error"]["code"]) == (status, code)


def test_health(server: Server) -> None:
    assert server.request("GET", "/live")[0] == 200
    assert server.request("GET", "/health")[::2] == server.request("GET", "/ready")[::2]
    status, _, body = server.request("GET", "/ready")
    assert (status, body["models"]) == (200, ["simulator"])


def test_what_is_refused_is_counted(server: Server) -> None:
    before = server.metric("penstock_requests_total", route="completions", outcome="refused_400")
    server.post("/v1/completions", prompt=5)
    assert server.metric("penstock_requests_total", route="completions", outcome="refused_400") == before + 1


def test_the_error_body_is_openais(server: Server) -> None:
    _, headers, body = server.request("POST", "/v1/completions", json.dumps({"model": "simulator"}).encode())
    assert headers["content-type"] == "application/json"
    assert set(body["error"]) == {"message", "type", "param", "code"}
