"""The default engine with the default model, through the whole stack, by the official client."""

from __future__ import annotations

import asyncio
import json
import re
import socket

import openai
import pytest
from jsonschema import Draft202012Validator
from openai import AsyncOpenAI

from e2e.harness import DEFAULT_MODEL, Server, wait_until
from schemas import CASES

SENTENCE = re.compile(r"^[A-Z][^\n]{20,}")


def ask(server: Server, content: str, **fields: object) -> str:
    messages = [{"role": "user", "content": content}]
    answer = server.client.chat.completions.create(model=DEFAULT_MODEL, messages=messages, **{"temperature": 0, **fields})  # type: ignore[call-overload]
    return str(answer.choices[0].message.content)


def test_a_chat_gives_sensible_english(model_server: Server) -> None:
    assert "Paris" in ask(model_server, "What is the capital of France?", max_tokens=40)
    text = ask(model_server, "Explain in two sentences why the sky is blue.", max_tokens=80)
    assert SENTENCE.match(text), text
    assert "light" in text.lower()


def test_a_stream_is_the_same_text_in_pieces(model_server: Server) -> None:
    whole = ask(model_server, "Name three fruits.", max_tokens=40)
    stream = model_server.client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": "Name three fruits."}],
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens > 4
    assert len(chunks) > 4


def test_a_turn_of_a_conversation_reuses_the_turns_before(model_server: Server) -> None:
    """`bench/engine.py` measures the times, with eight turns and 3,000 tokens."""
    paragraph = "The river runs from the mountains to the sea, and the people of the valley have built mills along it. " * 8
    messages: list[dict[str, str]] = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"Part {turn}. {paragraph} What happens next?"})
        answer = model_server.client.chat.completions.create(model=DEFAULT_MODEL, messages=messages, max_tokens=16, temperature=0)  # type: ignore[arg-type]
        messages.append({"role": "assistant", "content": str(answer.choices[0].message.content)})
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens > 700
    reused = usage.prompt_tokens_details.cached_tokens or 0
    last_turn = usage.prompt_tokens / 4
    assert reused > usage.prompt_tokens - last_turn * 1.3, "all but the last turn"


def test_sampling_fields_are_honoured(model_server: Server) -> None:
    client = model_server.client.completions
    base = {"model": DEFAULT_MODEL, "prompt": "Once upon a time", "max_tokens": 12}
    greedy = client.create(**base, temperature=0).choices[0].text  # type: ignore[call-overload]
    assert client.create(**base, temperature=1, extra_body={"top_k": 1}).choices[0].text == greedy  # type: ignore[call-overload]
    seeded = [client.create(**base, temperature=1, seed=5).choices[0].text for _ in range(2)]  # type: ignore[call-overload]
    assert seeded[0] == seeded[1] != client.create(**base, temperature=1, seed=6).choices[0].text  # type: ignore[call-overload]
    tokens = model_server.client.completions.create(**base, temperature=0, logprobs=2).choices[0].logprobs  # type: ignore[call-overload]
    assert tokens is not None
    assert "".join(tokens.tokens) == greedy
    assert all(value <= 0 for value in tokens.token_logprobs)
    assert all(max(top.values()) == value for top, value in zip(tokens.top_logprobs, tokens.token_logprobs, strict=True))


def test_logit_bias_and_stop_ids(model_server: Server) -> None:
    create = model_server.client.completions.create
    forced = create(model=DEFAULT_MODEL, prompt="Hello", max_tokens=3, temperature=0, logit_bias={"284": 100})
    token = forced.choices[0].text
    assert token == token[: len(token) // 3] * 3
    stopped = create(
        model=DEFAULT_MODEL, prompt="Hello", max_tokens=8, temperature=0, logit_bias={"284": 100}, extra_body={"stop_token_ids": [284]}
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens == 1


def test_many_prompts_and_choices_at_once(model_server: Server) -> None:
    prompts = ["The capital of Italy is", "The capital of Spain is", "Two and two is"]
    answer = model_server.client.completions.create(model=DEFAULT_MODEL, prompt=prompts, n=3, max_tokens=6, temperature=0)
    texts = [choice.text for choice in answer.choices]
    assert len(texts) == 9
    assert all(texts[start] == texts[start + 1] == texts[start + 2] for start in (0, 3, 6))
    assert "Rome" in texts[0]
    assert "Madrid" in texts[3]


def test_a_client_that_leaves_frees_its_pages(model_server: Server) -> None:
    body = json.dumps({"model": DEFAULT_MODEL, "prompt": "Once", "max_tokens": 4000, "stream": True, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", model_server.port)) as connection:
        connection.sendall(head.encode() + body)
        assert b"200 OK" in connection.recv(4096)
        wait_until(lambda: model_server.metric("penstock_kv_blocks", state="used") > 0)
    wait_until(lambda: model_server.metric("penstock_kv_blocks", state="used") == 0)
    assert model_server.metric("penstock_requests_running", role="worker") == 0


def test_the_engine_is_seen_in_the_metrics(model_server: Server) -> None:
    ask(model_server, "Hello", max_tokens=2)
    # Those of tests before this one, on the same server.
    sessions = model_server.metric("penstock_sessions")
    ask(model_server, "Hello", max_tokens=2)
    assert model_server.metric("penstock_prompt_tokens_total", source="cached") > 0
    assert model_server.metric("penstock_prompt_tokens_total", source="computed") > 0
    assert model_server.metric("penstock_kv_blocks", state="total") > 1000
    assert model_server.metric("penstock_preemptions_total") >= 0
    assert model_server.metric("penstock_sessions") <= sessions, "nobody has opened another"


# Structured output.


@pytest.mark.timeout(600)
async def test_every_schema_gives_valid_output(model_server: Server) -> None:
    """Each at temperature 1, all of them at once."""
    assert len(CASES) >= 60
    async with AsyncOpenAI(base_url=f"{model_server.url}/v1", api_key="none", max_retries=0, timeout=500) as client:

        async def wrong(name: str, schema: dict[str, object]) -> str | None:
            answer = await client.chat.completions.create(
                model=DEFAULT_MODEL,
                messages=[{"role": "user", "content": f"Make up an example of this: {name}"}],
                response_format={"type": "json_schema", "json_schema": {"name": "example", "schema": schema, "strict": True}},
                temperature=1,
                max_tokens=400,
                seed=11,
            )
            content, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
            if reason != "stop":
                return f"{name}: ended by {reason}: {content}"
            problems = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).iter_errors(
                json.loads(content or "")
            )
            return next((f"{name}: {problem.message} in {content}" for problem in problems), None)

        found = await asyncio.gather(*[wrong(name, schema) for name, schema in CASES.items()])
    assert not [problem for problem in found if problem], found


@pytest.mark.parametrize(
    ("wanted", "matches"),
    [
        ({"regex": r"[0-9]{4}-[0-9]{2}"}, r"[0-9]{4}-[0-9]{2}"),
        ({"choice": ["a river", "a dam"]}, r"a river|a dam"),
        ({"grammar": 'start: ("yes" | "no") "!"'}, r"(yes|no)!"),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 99}}, r"[1-9][0-9]"),
    ],
)
def test_other_grammars(model_server: Server, wanted: dict[str, object], matches: str) -> None:
    text = ask(model_server, "Answer.", temperature=1, max_tokens=40, extra_body={"structured_outputs": wanted})
    assert re.fullmatch(matches, text), text


def test_json_object_streamed(model_server: Server) -> None:
    stream = model_server.client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": "Describe a cat in JSON with name and age."}],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=120,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text.startswith("{")


def test_a_schema_that_cannot_work_is_refused_with_the_place(model_server: Server) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integr"}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(model_server, "Hello", response_format=response_format, stream=True)
    assert "properties.age.type" in caught.value.message
    assert caught.value.param == "response_format"
    assert caught.value.code == "invalid_grammar"
    assert ask(model_server, "Hello", max_tokens=3), "nobody else is hurt"
