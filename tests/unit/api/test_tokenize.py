"""/tokenize and /detokenize, and one model by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import ModelInfo

from front_end import MODEL, WORDS, FrontEnd, says
from penstock.text.tokenizers.tokenizer import ChatPrompt

MESSAGES: list[dict[str, Any]] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a water wheel"}]


async def ask(path: str, **fields: object) -> tuple[int, Any]:
    front_end = FrontEnd(says("x"))
    await front_end.send("POST", path, json.dumps(fields).encode())
    return front_end.status, front_end.json


async def refused(path: str, **fields: object) -> tuple[int, str, str, str]:
    status, answer = await ask(path, **fields)
    error = answer["error"]
    return status, error["code"], error["param"], error["message"]


async def test_a_prompt_is_tokenized_like_a_completion() -> None:
    status, answer = await ask("/tokenize", model="m", prompt="a water wheel")
    assert status == 200
    assert answer == {"count": len(answer["tokens"]), "max_model_len": MODEL.context_length, "tokens": WORDS.encode("a water wheel")}


async def test_token_strings_on_request() -> None:
    _, answer = await ask("/tokenize", model="m", prompt="a water é", return_token_strs=True)
    assert answer["token_strs"] == ["a", " water", " ", "\ufffd", "\ufffd"]
    assert len(answer["tokens"]) == answer["count"] == 5


async def test_a_prompt_without_special_tokens() -> None:
    _, answer = await ask("/tokenize", model="m", prompt="a water wheel", add_special_tokens=False)
    assert answer["tokens"] == WORDS.encode_part("a water wheel")


async def test_messages_are_tokenized_like_a_chat() -> None:
    _, answer = await ask("/tokenize", model="m", messages=MESSAGES)
    rendered = WORDS.render_chat(ChatPrompt([{"role": one["role"], "content": one["content"]} for one in MESSAGES]))
    assert WORDS.decode(answer["tokens"]) == WORDS.decode([token for part in WORDS.parts(rendered) for token in WORDS.encode_part(part)])
    _, without = await ask("/tokenize", model="m", messages=MESSAGES, add_generation_prompt=False)
    assert answer["tokens"][: without["count"]] == without["tokens"]
    assert 0 < without["count"] < answer["count"]


async def test_the_count_equals_the_usage_of_the_chat() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    body = {"model": "m", "messages": MESSAGES, "tools": tools}
    front_end = FrontEnd(says("x"), path="/v1/chat/completions")
    await front_end.post(**body)
    _, answer = await ask("/tokenize", **body)
    assert front_end.json["usage"]["prompt_tokens"] == answer["count"]


async def test_tokens_become_text_again() -> None:
    tokens = WORDS.encode("a water wheel é")
    assert await ask("/detokenize", model="m", tokens=tokens) == (200, {"prompt": "a water wheel é"})
    assert await ask("/detokenize", model="m", tokens=[]) == (200, {"prompt": ""})


async def test_the_model_is_optional_when_there_is_one() -> None:
    assert (await ask("/tokenize", prompt="x"))[0] == 200
    assert (await ask("/detokenize", tokens=[65]))[1] == {"prompt": "A"}


async def test_the_model_is_required_when_there_are_two() -> None:
    front_end = FrontEnd(says("x"))
    other = type(MODEL)("other", *(getattr(MODEL, name) for name in MODEL.__struct_fields__[1:]))
    front_end.models.live = [MODEL, other]
    await front_end.send("POST", "/detokenize", b'{"tokens": [65]}')
    assert (front_end.status, front_end.json["error"]["code"]) == (400, "missing_field")
    assert front_end.json["error"]["message"] == "`model` is required: this server has `m`, `other`"
    await front_end.send("POST", "/detokenize", b'{"tokens": [65], "model": "other"}')
    assert front_end.json == {"prompt": "A"}


async def test_without_a_worker_the_status_is_503() -> None:
    front_end = FrontEnd(says("x"))
    front_end.models.live = []
    await front_end.send("POST", "/tokenize", b'{"prompt": "x"}')
    assert (front_end.status, front_end.json["error"]["code"]) == (503, "no_worker")


@pytest.mark.parametrize(
    ("fields", "param", "expected"),
    [
        ({}, "prompt", "expected one of them, not neither"),
        ({"prompt": "x", "messages": MESSAGES}, "prompt", "expected one of them, not both"),
        ({"prompt": "x", "tools": []}, "tools", "`tools` needs `messages`"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message", "needs `messages`"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens", "expected false with `messages`"),
        ({"prompt": "x" * 100_000}, "prompt", "This model's maximum context length is"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages[0]", "This model's maximum context length is"),
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "is required"),
        ({"prompt": ["x"]}, "prompt", "expected `str | null`"),
        ({"prompt": "x", "unheard": 1}, "unheard", "unknown field `unheard`"),
    ],
)
async def test_wrong_requests_are_refused(fields: dict[str, Any], param: str, expected: str) -> None:
    status, _, found, message = await refused("/tokenize", model="m", **fields)
    assert (status, found) == (400, param)
    assert expected in message


@pytest.mark.parametrize(
    ("tokens", "param", "expected"),
    [
        ([5, -1], "tokens[1]", f"is -1: expected a token id from 0 to {WORDS.vocab_size - 1}"),
        ([WORDS.vocab_size], "tokens[0]", f"is {WORDS.vocab_size}: expected"),
        ([65] * 1001, "tokens", "`tokens` has 1,001 tokens: expected at most 1,000, the model's context"),
        (["x"], "tokens[0]", "expected `int`"),
        (None, "tokens", "expected `array`"),
    ],
)
async def test_wrong_tokens_are_refused(tokens: object, param: str, expected: str) -> None:
    status, _, found, message = await refused("/detokenize", model="m", tokens=tokens)
    assert (status, found) == (400, param)
    assert expected in message


async def test_an_unknown_model() -> None:
    for path, fields in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        assert (await refused(path, model="other", **fields))[:3] == (404, "model_not_found", "model")


async def test_get_a_model_by_name() -> None:
    front_end = FrontEnd(says("x"))
    slashed = type(MODEL)("org/name", *(getattr(MODEL, name) for name in MODEL.__struct_fields__[1:]))
    front_end.models.live = [MODEL, slashed, slashed]
    await front_end.send("GET", "/v1/models")
    listed = front_end.json["data"]
    assert [(model["id"], model["penstock"]["workers"]) for model in listed] == [("m", 1), ("org/name", 2)]
    for model in listed:
        await front_end.send("GET", f"/v1/models/{model['id']}")
        assert (front_end.status, front_end.json) == (200, model)
    await front_end.send("GET", "/v1/models/org")
    assert front_end.status == 404
    assert front_end.json["error"]["code"] == "model_not_found"
    assert "`m`, `org/name`" in front_end.json["error"]["message"]
    await front_end.send("DELETE", "/v1/models/m")
    assert front_end.status == 405


async def test_models_in_anthropics_form() -> None:
    front_end = FrontEnd(says("x"), reasoning_parser="think")
    version = {"anthropic-version": "2023-06-01"}
    await front_end.send("GET", "/v1/models?limit=1000", headers=version)
    listed = front_end.json
    [model] = listed["data"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "m", "m")
    assert (model["type"], model["id"], model["display_name"], model["lifecycle"]) == ("model", "m", "m", "active")
    assert model["created_at"] == "1970-01-01T00:00:00Z"
    assert model["max_input_tokens"] == MODEL.context_length
    assert not model["capabilities"]["image_input"]["supported"]
    assert model["capabilities"]["thinking"]["types"]["adaptive"]["supported"]
    read = ModelInfo.model_validate(model)
    assert read.model_extra == {}
    await front_end.send("GET", "/v1/models/m", headers=version)
    assert front_end.json == model
    front_end.models.live = []
    await front_end.send("GET", "/v1/models", headers=version)
    assert front_end.json == {"data": [], "has_more": False, "first_id": None, "last_id": None}
