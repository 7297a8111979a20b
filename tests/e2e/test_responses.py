"""/v1/responses and /v1/conversations through the real client."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage
from pydantic import BaseModel

from e2e.harness import DEFAULT_MODEL, Server, wait_until
from e2e.predicted import predicted

CUTS = 20
LOOK: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "strict": True,
}


class City(BaseModel):
    name: str
    population: int


def create(server: Server, **rest: Any) -> Any:
    rest.setdefault("input", "Hello")
    return server.client.responses.create(model="simulator", **rest)


def client_of(server: Server, key: str) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def seeded(seed: int, **rest: Any) -> dict[str, Any]:
    return {"extra_body": {"seed": seed, **rest}}


class Reader:
    """Reads the stream of a response, and loses its connection when the test wants it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.events: list[Any] = []

    @property
    def response_id(self) -> str:
        return str(self.events[0]["response"]["id"])

    @property
    def text(self) -> str:
        return "".join(event["delta"] for event in self.events if event["type"] == "response.output_text.delta")

    @property
    def is_over(self) -> bool:
        return bool(self.events) and self.events[-1]["type"] in ("response.completed", "response.incomplete", "response.failed")

    def begin(self, events: int, **fields: Any) -> None:
        body = json.dumps({"model": "simulator", "input": "Hello", "stream": True, **fields}).encode()
        self._read("POST", "/v1/responses", body, events)

    def resume(self, events: int = 10**9) -> None:
        last = self.events[-1]["sequence_number"]
        self._read("GET", f"/v1/responses/{self.response_id}?stream=true&starting_after={last}", None, events)

    def _read(self, method: str, path: str, body: bytes | None, events: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=30)
        try:
            connection.request(method, path, body, {"authorization": "Bearer none"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            while events and not self.is_over:
                line = response.readline()
                assert line, "the stream broke off"
                if line.startswith(b"data: "):
                    self.events.append(json.loads(line[6:]))
                    assert self.events[-1]["sequence_number"] == len(self.events) - 1
                    events -= 1
        finally:
            connection.close()


def test_whole(server: Server) -> None:
    answer = create(server, instructions="Be brief.", max_output_tokens=12, metadata={"a": "b"}, temperature=0.5, user="u", **seeded(4))
    assert answer.output_text == predicted(4, 12)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.id.startswith("resp_")
    assert (answer.metadata, answer.temperature, answer.instructions, answer.user) == ({"a": "b"}, 0.5, "Be brief.", "u")
    assert (answer.tools, answer.tool_choice, answer.truncation, answer.background) == ([], "auto", "disabled", False)
    assert answer.usage.output_tokens == 12
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12
    assert server.client.responses.retrieve(answer.id) == answer
    assert create(server, **seeded(4)).status == "completed"


def test_the_streaming_helper(server: Server) -> None:
    text = ""
    with server.client.responses.stream(model="simulator", input="Hello", **seeded(4)) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
                assert event.snapshot == text
        final = stream.get_final_response()
    assert final.output_text == text
    assert final.status == "completed"
    assert text == create(server, **seeded(4)).output_text
    assert server.client.responses.retrieve(final.id).output_text == text


def test_logprobs(server: Server) -> None:
    asked: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 3, "max_output_tokens": 5, **seeded(4)}
    whole = create(server, **asked)
    found = whole.output[0].content[0].logprobs
    assert "".join(entry.token for entry in found) == predicted(4, 5)
    assert [len(entry.top_logprobs) for entry in found] == [3] * 5
    events = list(create(server, stream=True, **asked))
    streamed = [entry.token for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert "".join(streamed) == predicted(4, 5)


def test_not_stored(server: Server) -> None:
    answer = create(server, store=False, max_output_tokens=3)
    with pytest.raises(openai.NotFoundError):
        server.client.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError, match="`background` needs `store`"):
        create(server, store=False, background=True)


def test_a_chain(server: Server) -> None:
    """The second turn has what the first had, and finds its KV."""
    first = create(server, input="My name is Bo.", instructions="Be kind.", max_output_tokens=40, **seeded(4))
    second = create(server, input="And now?", previous_response_id=first.id, max_output_tokens=5)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.model_extra["nvext"]["session"]["id"] == first.id
    third = create(server, input="Then?", previous_response_id=second.id, max_output_tokens=5)
    assert third.model_extra["nvext"]["session"]["id"] == first.id
    assert third.usage.input_tokens_details.cached_tokens > 0
    by_hand = [
        {"role": "user", "content": "My name is Bo."},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And now?"},
    ]
    count = server.client.responses.input_tokens.count
    assert count(model="simulator", input=by_hand).input_tokens == second.usage.input_tokens, "without the earlier instructions"  # type: ignore[arg-type]
    assert count(model="simulator", input="And now?", previous_response_id=first.id).input_tokens == second.usage.input_tokens
    own: list[Any] = server.client.responses.input_items.list(second.id).data
    assert [item.content[0].text for item in own] == ["And now?"]
    server.client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="was deleted"):
        create(server, previous_response_id=second.id)


def test_a_chain_can_fork(server: Server) -> None:
    first = create(server, max_output_tokens=5)
    answers = [create(server, input=text, previous_response_id=first.id, max_output_tokens=5) for text in ("Here?", "Here?")]
    assert answers[0].usage.input_tokens == answers[1].usage.input_tokens


def test_items_are_sent_back_and_referred_to(server: Server) -> None:
    first = create(server, max_output_tokens=5)
    history = [{"role": "user", "content": "Hello"}, *[item.to_dict() for item in first.output], {"role": "user", "content": "More"}]
    again = create(server, input=history, max_output_tokens=5)
    reference = [history[0], {"type": "item_reference", "id": first.output[0].id}, history[-1]]
    assert create(server, input=reference, max_output_tokens=5).usage.input_tokens == again.usage.input_tokens
    with pytest.raises(openai.NotFoundError, match=r"input\[0\]\.id"):
        create(server, input=[{"type": "item_reference", "id": "msg_unknown"}])


def test_a_conversation(server: Server) -> None:
    client = server.client
    conversation = client.conversations.create(items=[{"role": "user", "content": "I am Bo."}], metadata={"a": "b"})
    answer = create(server, conversation=conversation.id, max_output_tokens=5)
    assert answer.conversation.id == conversation.id
    assert answer.model_extra["nvext"]["session"]["id"] == conversation.id
    streamed = list(create(server, input="Go on", conversation={"id": conversation.id}, max_output_tokens=5, stream=True))[-1].response
    assert streamed.usage.input_tokens > answer.usage.input_tokens
    items: list[Any] = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
    texts = [item.content[0].text for item in items]
    assert texts == ["I am Bo.", "Hello", answer.output_text, "Go on", streamed.output_text]
    added: Any = client.conversations.items.create(conversation.id, items=[{"role": "developer", "content": "Rules."}]).data[0]
    assert client.conversations.items.retrieve(added.id, conversation_id=conversation.id) == added
    client.conversations.items.delete(added.id, conversation_id=conversation.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(added.id, conversation_id=conversation.id)
    assert client.conversations.update(conversation.id, metadata={"a": "c"}).metadata == {"a": "c"}
    assert client.conversations.retrieve(conversation.id).metadata == {"a": "c"}
    with pytest.raises(openai.BadRequestError, match="cannot be combined"):
        create(server, conversation=conversation.id, previous_response_id=answer.id)
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        create(server, conversation=conversation.id)


def test_turns_of_a_conversation_at_once(server: Server) -> None:
    conversation = server.client.conversations.create()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        turns = [
            pool.submit(create, server, input=f"Turn {number}", conversation=conversation.id, max_output_tokens=9, stream=number % 2 == 0)
            for number in range(16)
        ]
        for turn in turns:
            answer = turn.result()
            if hasattr(answer, "close"):
                list(answer)
    items: list[Any] = list(server.client.conversations.items.list(conversation.id, order="asc", limit=100))
    asked = [item.content[0].text for item in items if item.role == "user"]
    assert sorted(asked) == sorted(f"Turn {number}" for number in range(16))
    assert len(items) == 32


def test_background(server: Server) -> None:
    answer = create(server, background=True, max_output_tokens=30, **seeded(4, ignore_eos=True))
    assert answer.status == "queued"
    assert answer.output == []
    wait_until(lambda: server.client.responses.retrieve(answer.id).status not in ("queued", "in_progress"))
    final = server.client.responses.retrieve(answer.id)
    assert final.status == "incomplete"
    assert final.output_text == predicted(4, 30)
    assert server.client.responses.cancel(answer.id).status == "incomplete", "what is over stays as it is"
    events = list(server.client.responses.retrieve(answer.id, stream=True))
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_background_streams_and_is_cancelled(server: Server) -> None:
    stream = create(server, background=True, stream=True, max_output_tokens=4000, **seeded(4, ignore_eos=True))
    seen = [next(iter(stream)) for _ in range(20)]
    response_id = seen[0].response.id
    stream.close()
    assert server.client.responses.retrieve(response_id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="expected one that is completed"):
        create(server, previous_response_id=response_id)
    cancelled = server.client.responses.cancel(response_id)
    assert cancelled.status == "cancelled"
    assert server.client.responses.retrieve(response_id).status == "cancelled"
    events = list(server.client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number))
    assert events[0].sequence_number == seen[-1].sequence_number + 1
    text = "".join(event.delta for event in [*seen, *events] if event.type == "response.output_text.delta")
    assert cancelled.output_text == text
    assert text
    assert predicted(4, 4000).startswith(text)


def test_only_background_can_be_cancelled(server: Server) -> None:
    answer = create(server, max_output_tokens=3)
    with pytest.raises(openai.BadRequestError, match="background"):
        server.client.responses.cancel(answer.id)
    with pytest.raises(openai.BadRequestError, match="`stream`"):
        server.client.responses.retrieve(answer.id, stream=True)


def test_twenty_cuts_cost_nothing(server: Server) -> None:
    reader = Reader(server)
    reader.begin(4, max_output_tokens=400, seed=4, ignore_eos=True)
    for _ in range(CUTS):
        reader.resume(events=7)
    assert len(reader.events) == 4 + 7 * CUTS
    reader.resume()
    assert reader.events[-1]["type"] == "response.incomplete"
    assert reader.text == predicted(4, 400)
    assert server.client.responses.retrieve(reader.response_id).output_text == reader.text
    path = f"/v1/responses/{reader.response_id}?stream=true&starting_after=99999"
    status, _, body = server.request("GET", path, None, {"authorization": "Bearer none"})
    assert status == 400
    assert body["error"]["param"] == "starting_after"


def test_a_stream_that_nobody_reads_ends_after_the_grace(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve("--resume-grace", "0.2", "--step-ms", "5", "--response-store", str(tmp_path / "r.db"))
    reader = Reader(server)
    reader.begin(10, max_output_tokens=20_000, seed=4, ignore_eos=True)
    wait_until(lambda: server.client.responses.retrieve(reader.response_id).status == "cancelled")
    reader.resume()
    assert reader.events[-1]["response"]["status"] == "cancelled"
    wait_until(lambda: server.metric("penstock_requests_running", role="worker") == 0)


def test_after_a_restart(serve: Callable[..., Server], tmp_path: Path) -> None:
    arguments = ("--step-ms", "5", "--response-store", str(tmp_path / "r.db"), "--grace", "1")
    server = serve(*arguments)
    done = create(server, max_output_tokens=9, **seeded(4))
    reader = Reader(server)
    reader.begin(10, max_output_tokens=60, seed=4, ignore_eos=True)
    reader.resume()
    running = create(server, background=True, max_output_tokens=20_000, **seeded(4, ignore_eos=True))
    wait_until(lambda: server.client.responses.retrieve(running.id).status == "in_progress")
    assert server.stop() == 0
    server = serve(*arguments)
    again = Reader(server)
    again.events = reader.events[:5]
    again.resume()
    assert again.events == reader.events
    assert again.text == predicted(4, 60)
    assert server.client.responses.retrieve(done.id).output_text == done.output_text
    assert create(server, previous_response_id=done.id, max_output_tokens=3).status == "incomplete"
    failed = server.client.responses.retrieve(running.id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert "shutting down" in failed.error.message
    assert predicted(4, 20_000).startswith(failed.output_text)
    assert server.metric("penstock_streams_resumed_total") == 1
    assert server.metric("penstock_response_store_bytes") > 0


def test_after_a_crash(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve("--step-ms", "5", "--response-store", str(tmp_path / "r.db"))
    done = create(server, max_output_tokens=9)
    reader = Reader(server)
    reader.begin(10, max_output_tokens=20_000, seed=4, ignore_eos=True)
    url = server.url
    server.child("frontend").kill()
    wait_until(lambda: server.url != url)
    with client_of(server, "none") as client:
        assert client.responses.retrieve(done.id).output_text == done.output_text
        lost = client.responses.retrieve(reader.response_id)
        assert lost.status == "failed"
        assert lost.error is not None
        assert "has ended" in lost.error.message
    reader.resume()
    assert reader.events[-1]["type"] == "response.failed"


def test_one_key_knows_nothing_of_another(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve("--step-ms", "2", "--response-store", str(tmp_path / "r.db"), environment={"PENSTOCK_API_KEY": "ann,bob"})
    ann = client_of(server, "ann")
    made = ann.responses.create(model="simulator", input="A secret", max_output_tokens=5, stream=True)
    response = list(made)[-1].response  # type: ignore[union-attr]
    running = ann.responses.create(model="simulator", input="A", background=True, max_output_tokens=60_000, **seeded(1, ignore_eos=True))
    wait_until(lambda: ann.responses.retrieve(running.id).status == "in_progress")
    conversation = ann.conversations.create(items=[{"role": "user", "content": "A secret"}])
    item = ann.conversations.items.list(conversation.id).data[0].id
    body = {"model": "simulator", "input": "b", "max_output_tokens": 3}
    asked = [
        ("GET", f"/v1/responses/{response.id}", None),
        ("GET", f"/v1/responses/{response.id}?stream=true", None),
        ("GET", f"/v1/responses/{running.id}", None),
        ("GET", f"/v1/responses/{running.id}?stream=true", None),
        ("POST", f"/v1/responses/{running.id}/cancel", None),
        ("GET", f"/v1/responses/{response.id}/input_items", None),
        ("DELETE", f"/v1/responses/{running.id}", None),
        ("DELETE", f"/v1/responses/{response.id}", None),
        ("POST", "/v1/responses", {**body, "previous_response_id": response.id}),
        ("POST", "/v1/responses", {**body, "conversation": conversation.id}),
        ("POST", "/v1/responses", {**body, "input": [{"type": "item_reference", "id": item}]}),
        ("POST", "/v1/responses", {**body, "input": [{"type": "item_reference", "id": response.output[0].id}]}),
        ("POST", "/v1/responses/input_tokens", {"model": "simulator", "previous_response_id": response.id}),
        ("POST", "/v1/responses/input_tokens", {"model": "simulator", "conversation": conversation.id}),
        ("GET", f"/v1/conversations/{conversation.id}", None),
        ("POST", f"/v1/conversations/{conversation.id}", {"metadata": {"a": "b"}}),
        ("GET", f"/v1/conversations/{conversation.id}/items", None),
        ("POST", f"/v1/conversations/{conversation.id}/items", {"items": [{"role": "user", "content": "b"}]}),
        ("GET", f"/v1/conversations/{conversation.id}/items/{item}", None),
        ("DELETE", f"/v1/conversations/{conversation.id}/items/{item}", None),
        ("DELETE", f"/v1/conversations/{conversation.id}", None),
    ]
    known = [response.id, running.id, conversation.id, item, response.output[0].id]
    for method, path, fields in asked:
        sent = None if fields is None else json.dumps(fields)
        seen = server.request(method, path, None if sent is None else sent.encode(), {"authorization": "Bearer bob"})
        assert seen[0] == 404, (method, path, seen)
        for number, one in enumerate(known):
            path, sent = path.replace(one, f"unknown-{number}"), None if sent is None else sent.replace(one, f"unknown-{number}")
        unknown = server.request(method, path, None if sent is None else sent.encode(), {"authorization": "Bearer bob"})
        message = unknown[2]["error"]["message"]
        for number, one in enumerate(known):
            message = message.replace(f"unknown-{number}", one)
        assert seen[2]["error"] == {**unknown[2]["error"], "message": message}, "it is as if it did not exist"
    assert ann.responses.retrieve(running.id).status == "in_progress"
    assert len(ann.conversations.items.list(conversation.id).data) == 1
    ann.responses.delete(running.id)
    with pytest.raises(openai.NotFoundError) as caught:
        ann.responses.retrieve(running.id)
    assert caught.value.code == "response_not_found"
    wait_until(lambda: server.metric("penstock_requests_running", role="worker") == 0)
    ann.close()


def test_without_a_store(serve: Callable[..., Server]) -> None:
    server = serve("--response-store", "none")
    answer = create(server, max_output_tokens=3)
    assert answer.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError, match="does not store responses"):
        server.client.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError, match="`store` is true"):
        create(server, store=True)
    with pytest.raises(openai.NotFoundError):
        server.client.conversations.create()
    assert [event.type for event in create(server, max_output_tokens=3, stream=True)][-1] == "response.incomplete"


def test_truncation(server: Server) -> None:
    """The model's context is 4,096 tokens here."""
    history = [{"role": "user", "content": f"{number} " + "word " * 300} for number in range(40)]
    with pytest.raises(openai.BadRequestError) as caught:
        create(server, input=history, max_output_tokens=10)
    assert caught.value.code == "context_length_exceeded"
    answer = create(server, input=history, truncation="auto", max_output_tokens=10, instructions="Be brief.")
    assert 4096 - 10 - 700 < answer.usage.input_tokens <= 4096 - 10
    with pytest.raises(openai.BadRequestError):
        create(server, input="word " * 5000, truncation="auto")


@pytest.mark.parametrize("fields", [{}, {"store": False}, {"background": True}, {"truncation": "auto"}])
def test_a_stream_says_that_the_prompt_is_too_long(server: Server, fields: Any) -> None:
    """Codex understands the event, and shows a status as it is."""
    created, failed = create(server, input="word " * 5000, stream=True, **fields)
    assert (created.type, created.sequence_number, created.response.status) == ("response.created", 0, "in_progress")
    assert (failed.type, failed.sequence_number, failed.response.status) == ("response.failed", 1, "failed")
    assert failed.response.error.code == "context_length_exceeded"
    assert "4096" in failed.response.error.message.replace(",", "")
    assert (failed.response.store, failed.response.output) == (False, [])
    with pytest.raises(openai.NotFoundError):
        server.client.responses.retrieve(failed.response.id)


def test_the_stream_options_of_chats_change_nothing(server: Server) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    events: list[Any] = list(create(server, stream=True, stream_options=options, max_output_tokens=3))
    assert events[-1].response.usage.output_tokens == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 7}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]}, "input[0].call_id"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"truncation": "maybe"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": ["everything"]}, "include[0]"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"stream_options": {}}, "stream_options"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"mood": "good"}, "mood"),
        ({"conversation": {"id": "c", "x": 1}}, "conversation.x"),
        ({"previous_response_id": "x" * 300}, "previous_response_id"),
        ({"metadata": {"a": "x" * 513}}, "metadata[...]"),
    ],
)
def test_what_is_wrong_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    status, _, body = server.post("/v1/responses", **{"input": "Hello", **fields})
    assert status == 400, body
    assert body["error"]["param"] == param, body
    assert body["error"]["type"] == "invalid_request_error"


def test_bombs(server: Server) -> None:
    for opening, closing in ((b'{"model":"simulator","input":' + b"[" * 100_000, b"]" * 100_000 + b"}"),):
        status, _, body = server.request("POST", "/v1/responses", opening + closing)
        assert (status, body["error"]["code"]) == (400, "invalid_json")
    deep = '{"a":' * 300 + "1" + "}" * 300
    tool = '{"type":"function","name":"a","parameters":' + deep + "}"
    for fields in (f'"tools":[{tool}]', '"text":{"format":{"type":"json_schema","name":"a","schema":' + deep + "}}"):
        raw = ('{"model":"simulator","input":"Hello",' + fields + "}").encode()
        status, _, body = server.request("POST", "/v1/responses", raw)
        assert (status, body["error"]["code"]) == (400, "too_deep"), body
    status, _, body = server.post("/v1/responses", input=[{"role": "user", "content": ""}] * 20_000)
    assert (status, body["error"]["code"]) == (413, "body_too_complex")
    status, _, body = server.request("GET", "/v1/responses/" + "x" * 5000)
    assert status == 404


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "before=a", "after=nothing", "mood=good"])
def test_pages_that_cannot_be(server: Server, query: str) -> None:
    answer = create(server, max_output_tokens=3)
    status, _, body = server.request("GET", f"/v1/responses/{answer.id}/input_items?{query}", None, {"authorization": "Bearer none"})
    assert status == 400
    assert body["error"]["param"] == query.partition("=")[0]


def test_a_hosted_tool_is_left_out(server: Server) -> None:
    answer = create(server, tools=[{"type": "web_search"}, LOOK], max_output_tokens=3)
    assert [tool.type for tool in answer.tools] == ["function"]


def test_parse(model_server: Server) -> None:
    answer = model_server.client.responses.parse(
        model=DEFAULT_MODEL, input="Name a city and how many people live there.", text_format=City, temperature=0, max_output_tokens=60
    )
    assert isinstance(answer.output_parsed, City)
    with model_server.client.responses.stream(
        model=DEFAULT_MODEL, input="Name a city and how many people live there.", text_format=City, temperature=0, max_output_tokens=60
    ) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed


SPACE: Any = {"type": "namespace", "name": "mcp__sky", "description": "All about the sky.", "tools": [LOOK]}


@pytest.mark.parametrize("tool", [LOOK, SPACE], ids=["function", "namespace"])
@pytest.mark.parametrize("is_chain", [True, False])
def test_a_loop_of_calls_and_answers(model_server: Server, is_chain: bool, tool: Any) -> None:
    """The model must call; the client runs the tool; the model answers with what it was told."""
    client = model_server.client
    question: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    forced: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    first = client.responses.create(model=DEFAULT_MODEL, input=question, temperature=0, max_output_tokens=100, **forced)
    (call,) = [item for item in first.output if isinstance(item, ResponseFunctionToolCall)]
    assert (call.name, call.namespace) == ("get_weather", None if tool is LOOK else "mcp__sky")
    assert set(json.loads(call.arguments)) == {"city", "unit"}
    assert call.id is not None
    assert call.id.startswith("fc_")
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"degrees": 21}'}
    context: Any = (
        {"input": [output], "previous_response_id": first.id}
        if is_chain
        else {"input": [*question, *(item.to_dict() for item in first.output), output], "store": False}
    )
    second = client.responses.create(model=DEFAULT_MODEL, tools=[tool], tool_choice="none", temperature=0, max_output_tokens=30, **context)
    assert any(isinstance(item, ResponseOutputMessage) for item in second.output)
    assert second.output_text


@pytest.mark.parametrize("way", ["chain", "conversation", "echo"])
def test_a_call_in_a_namespace_is_stored_and_read_like_it_was_written(model_server: Server, way: str) -> None:
    """The tokens of the answer are a prefix of the next turn, so the name in the prompt is the one that the model wrote."""
    client = model_server.client
    asked: Any = {"model": DEFAULT_MODEL, "tools": [SPACE], "temperature": 0, "max_output_tokens": 100, "parallel_tool_calls": False}
    choice: Any = {"type": "function", "name": "get_weather", "namespace": "mcp__sky"}
    question: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    conversation = client.conversations.create() if way == "conversation" else None
    place: Any = {} if conversation is None else {"conversation": conversation.id}
    events: list[Any] = list(client.responses.create(input=question, tool_choice=choice, stream=True, **asked, **place))
    first = events[-1].response
    (call,) = first.output
    stored: Any
    (stored,) = client.responses.retrieve(first.id).output
    if conversation is not None:
        stored = next(iter(client.conversations.items.list(conversation.id)))
    assert (stored.namespace, stored.name, stored.arguments) == ("mcp__sky", "get_weather", call.arguments)
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history: Any = [*question, call.to_dict(), output] if way == "echo" else [output]
    place = {"previous_response_id": first.id} if way == "chain" else place
    second: Any = client.responses.create(input=history, **asked, **place)
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens > first.usage.total_tokens - 40


def test_a_forced_call_has_no_format(model_server: Server) -> None:
    answer = model_server.client.responses.parse(
        model=DEFAULT_MODEL,
        input="What is the weather in Paris?",
        text_format=City,
        tools=[LOOK],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=100,
    )
    (call,) = answer.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"city", "unit"}


def test_calls_are_streamed(model_server: Server) -> None:
    forced: Any = {"tools": [LOOK], "tool_choice": {"type": "function", "name": "get_weather"}, "parallel_tool_calls": False}
    with model_server.client.responses.stream(
        model=DEFAULT_MODEL, input="What is the weather in Paris?", temperature=0, max_output_tokens=100, **forced
    ) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        (call,) = stream.get_final_response().output
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.arguments == deltas
    assert json.loads(deltas)


def test_a_custom_tool(model_server: Server) -> None:
    tool: Any = {"type": "custom", "name": "note", "description": "Writes a short note."}
    stream = model_server.client.responses.create(
        model=DEFAULT_MODEL,
        input="Note that the sky is blue.",
        tools=[tool],
        tool_choice={"type": "custom", "name": "note"},
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=200,
        stream=True,
    )
    events: list[Any] = list(stream)
    response = events[-1].response
    if response.status == "completed":
        (call,) = response.output
        assert (call.type, call.name) == ("custom_tool_call", "note")
        assert [event.input for event in events if event.type == "response.custom_tool_call_input.done"] == [call.input]
    else:
        assert response.status == "incomplete"


def test_what_has_no_room_is_refused_at_once(serve: Callable[..., Server], tmp_path: Path) -> None:
    server = serve("--max-generations", "1", "--step-ms", "5", "--response-store", str(tmp_path / "r.db"))
    first = create(server, background=True, max_output_tokens=20_000, **seeded(4, ignore_eos=True))
    with pytest.raises(openai.RateLimitError):
        create(server, background=True)
    with pytest.raises(openai.RateLimitError):
        create(server, stream=True)
    server.client.responses.delete(first.id)
    assert server.metric("penstock_responses_stored_total") == 0
    assert create(server, max_output_tokens=3).output_text


def test_two_front_ends_share_a_store(serve: Callable[..., Server], tmp_path: Path) -> None:
    """Two servers, in fact: what counts is the file."""
    arguments = ("--step-ms", "5", "--response-store", str(tmp_path / "r.db"))
    one, other = serve(*arguments), serve(*arguments)
    running = create(one, background=True, max_output_tokens=20_000, **seeded(4, ignore_eos=True))
    assert other.client.responses.retrieve(running.id).status in ("queued", "in_progress")
    with pytest.raises(openai.ConflictError, match="another front end"):
        other.client.responses.cancel(running.id)
    with pytest.raises(openai.ConflictError, match="another front end"):
        other.client.responses.retrieve(running.id, stream=True)
    assert one.client.responses.cancel(running.id).status == "cancelled"
    assert other.client.responses.retrieve(running.id).status == "cancelled"
    assert list(other.client.responses.retrieve(running.id, stream=True))[-1].type == "response.incomplete"
    first = create(one, max_output_tokens=3)
    assert create(other, previous_response_id=first.id, max_output_tokens=3).output_text


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/responses", b'{"model":"simulator","input":"\\ud800"}'),
        ("POST", "/v1/responses", b'{"model":"simulator","input":"a","previous_response_id":"\\u0000"}'),
        ("POST", "/v1/responses", b'{"model":"simulator","input":"\xff"}'),
        ("POST", "/v1/responses", b'{"model":"simulator","input":[{"role":"user","content":"a","id":"\\ud800"}]}'),
        ("POST", "/v1/responses", b"[]"),
        ("POST", "/v1/conversations", b'{"metadata":{"a":1}}'),
        ("POST", "/v1/conversations", b'{"items":[{"type":"item_reference","id":"a"}]}'),
        ("POST", "/v1/conversations", b"[" * 100_000),
        ("POST", "/v1/conversations/x", b"{}"),
        ("GET", "/v1/responses/%00", None),
        ("GET", "/v1/responses/%ff%fe", None),
        ("GET", "/v1/responses/x?starting_after=1", None),
        ("GET", "/v1/responses/x?stream=maybe", None),
        ("GET", "/v1/responses/x?stream=true&starting_after=-1", None),
        ("GET", "/v1/conversations/x/items?after=%ff", None),
        ("PUT", "/v1/responses/x", None),
    ],
)
def test_nothing_is_taken_for_an_error_of_the_server(server: Server, method: str, path: str, body: bytes | None) -> None:
    status, _, answer = server.request(method, path, body)
    assert 400 <= status < 500, answer
    assert answer["error"]["message"]
