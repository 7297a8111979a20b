"""A long prefill: the real clients take what is sent meanwhile, and get the same answer as without it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from anthropic import Anthropic

from e2e.harness import Server
from e2e.predicted import predicted

# 60 prompt tokens take 1.5 s.
SLOW = ("--prefill-rate", "40", "--step-ms", "1", "--keep-alive", "0.2", "--whole-keep-alive", "0.2")
WORDS = " water" * 60


def user(text: str) -> Any:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    server = Server(*SLOW)
    yield server.wait_ready()
    server.stop()


def keep_alives(server: Server) -> float:
    _, _, text = server.request("GET", "/metrics")
    (line,) = [line for line in text.splitlines() if line.startswith("penstock_keep_alives_total ")]
    return float(line.split()[1])


def chat(server: Server, text: str) -> str:
    chunks = server.client.chat.completions.create(model=server.model, messages=[user(text)], stream=True, max_tokens=4, seed=7)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def whole_chat(server: Server, text: str) -> str:
    answer = server.client.chat.completions.create(model=server.model, messages=[user(text)], max_tokens=4, seed=7)
    return answer.choices[0].message.content or ""


def completion(server: Server, text: str) -> str:
    chunks = server.client.completions.create(model=server.model, prompt=text, stream=True, max_tokens=4, seed=7)
    return "".join(chunk.choices[0].text for chunk in chunks)


def response(server: Server, text: str) -> str:
    with server.client.responses.stream(model=server.model, input=text, max_output_tokens=4, extra_body={"seed": 7}) as stream:
        return "".join(event.delta for event in stream if event.type == "response.output_text.delta")


def whole_response(server: Server, text: str) -> str:
    return server.client.responses.create(model=server.model, input=text, max_output_tokens=4, extra_body={"seed": 7}).output_text


@pytest.mark.parametrize("ask", [chat, whole_chat, completion, response, whole_response])
def test_openais_client_takes_what_is_sent_before_the_first_token(slow: Server, ask: Callable[[Server, str], str]) -> None:
    before = keep_alives(slow)
    # A prompt of its own, so that nothing of it is cached.
    assert ask(slow, ask.__name__ + WORDS).strip() == predicted(7, 4).strip()
    assert keep_alives(slow) >= before + 2


@pytest.mark.parametrize("stream", [True, False])
def test_anthropics_client_takes_what_is_sent_before_the_first_token(slow: Server, stream: bool) -> None:
    before, text = keep_alives(slow), f"stream {stream}" + WORDS
    client = Anthropic(base_url=slow.url, api_key="none", max_retries=0)
    if stream:
        with client.messages.stream(model=slow.model, messages=[user(text)], max_tokens=4) as events:
            answer: Any = events.get_final_message()
    else:
        answer = client.messages.create(model=slow.model, messages=[user(text)], max_tokens=4)
    assert (answer.usage.output_tokens, answer.stop_reason) == (4, "max_tokens")
    assert keep_alives(slow) >= before + 2


def test_a_whole_answer_that_cannot_end_is_broken_off(serve: Callable[..., Server]) -> None:
    server = serve("--prefill-rate", "1", "--whole-keep-alive", "0.1", "--keep-alive", "0.1", "--grace", "0.1")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    body = {"model": server.model, "messages": [user(WORDS)], "max_tokens": 4}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert (answer.status, answer.headers["transfer-encoding"]) == (200, "chunked")
    assert answer.read(1) == b"\n"
    server.process.terminate()
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        answer.read()
    connection.close()


def test_a_stream_tells_that_the_server_stops_before_the_first_token(serve: Callable[..., Server]) -> None:
    server = serve("--prefill-rate", "1", "--keep-alive", "0.1", "--grace", "0.1")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    body = {"model": server.model, "messages": [user(WORDS)], "max_tokens": 4, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.readline() == b": keep-alive\n"
    server.process.terminate()
    assert b'"code":"shutting_down"' in answer.read()
    connection.close()
