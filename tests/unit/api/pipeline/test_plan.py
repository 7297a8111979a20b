"""What a request asks for reaches its Submits; what is wrong is refused with the field named."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from front_end import MODEL, request
from penstock.api.models import ServedModel
from penstock.api.openai.chat import parse_chat
from penstock.api.openai.completions import parse_completion
from penstock.api.pipeline.plan import MAX_GRAMMAR_BYTES, Chat, Plan, check_lengths
from penstock.api.pipeline.request import Incoming
from penstock.media.picture import ImageRef
from penstock.text.images import image_mark
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt
from penstock.text.tokenizers.words import WordTokenizer
from penstock.wire.errors import RequestError
from penstock.wire.messages import Grammar

LAST = MODEL.vocab_size - 1
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "ä"}}}
SOURCE = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"const":"ä"}}}'
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True, "description": "d"}}


async def completion(**fields: object) -> Plan:
    return (await parse_completion(*await request({"model": "m", "prompt": "x", **fields})))[0]


async def chat(**fields: object) -> Plan:
    return (await parse_chat(*await request({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields})))[0]


@pytest.mark.parametrize(
    ("structured", "grammar"),
    [
        ({"json": SCHEMA}, Grammar("json_schema", SOURCE)),
        ({"json": '{ "type": "null" }'}, Grammar("json_schema", '{ "type": "null" }')),
        ({"json_object": True}, Grammar("json_object")),
        ({"json_object": False, "regex": "a+"}, Grammar("regex", "a+")),
        ({"choice": ["ja", 'n"ein'], "json": None}, Grammar("choice", '["ja","n\\"ein"]')),
        ({"grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
    ],
)
async def test_structured_outputs(structured: dict[str, Any], grammar: Grammar) -> None:
    for plan in (await completion(structured_outputs=structured, n=2), await chat(structured_outputs=structured, n=2)):
        assert [submit.grammar for submit in plan.submits] == [grammar] * 2
        assert plan.grammar_field == "structured_outputs"


@pytest.mark.parametrize(
    ("response_format", "grammar"),
    [({"type": "text"}, None), ({"type": "json_object"}, Grammar("json_object")), (FORMAT, Grammar("json_schema", SOURCE)), (None, None)],
)
async def test_response_format(response_format: object, grammar: Grammar | None) -> None:
    plan = await chat(response_format=response_format)
    assert plan.submits[0].grammar == grammar
    assert plan.grammar_field == (grammar and "response_format")


async def test_a_seed_is_for_the_first_choice_and_the_next_ones_for_the_others() -> None:
    for plan in (await completion(seed=2**63 - 1, n=3), await chat(seed=2**63 - 1, n=3)):
        assert [(submit.seed, submit.is_seed_drawn) for submit in plan.submits] == [(2**63 - 1 + choice, False) for choice in range(3)]


@pytest.mark.parametrize("fields", [{}, {"seed": None}])
async def test_without_a_seed_every_choice_has_one_that_nobody_asked_for(fields: dict[str, Any]) -> None:
    for plan in (await completion(n=3, **fields), await chat(n=3, **fields)):
        assert len({submit.seed for submit in plan.submits}) == 3
        assert all(submit.is_seed_drawn for submit in plan.submits)


async def test_text_is_no_second_grammar() -> None:
    plan = await chat(response_format={"type": "text"}, structured_outputs={"regex": "a"})
    assert plan.submits[0].grammar == Grammar("regex", "a")


async def test_biases_and_stops_reach_every_choice() -> None:
    plan = await completion(logit_bias={"5": -100, str(LAST): 1.5}, stop_token_ids=[0, LAST], n=2)
    assert [submit.logit_bias for submit in plan.submits] == [((5, -100.0), (LAST, 1.5))] * 2
    assert [submit.stop_ids for submit in plan.submits] == [(0, LAST)] * 2
    assert (await chat(logit_bias={"7": 3})).submits[0].logit_bias == ((7, 3.0),)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"logit_bias": {"50000": 1}}, "logit_bias.50000", f"expected a token id from 0 to {LAST}"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "expected a token id"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "expected a token id"),
        ({"logit_bias": {"05": 1}}, "logit_bias.05", "expected a token id"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias." + "9" * 80, "expected a token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "`logit_bias.5` is 101: expected a number from -100 to 100"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5", '`logit_bias.5` is "1"'),
        ({"logit_bias": {"5": True}}, "logit_bias.5", "`logit_bias.5` is true"),
        ({"logit_bias": {"5": None}}, "logit_bias.5", "`logit_bias.5` is null"),
        ({"logit_bias": {str(n): 0 for n in range(1025)}}, "logit_bias", "`logit_bias` has 1,025 members: expected at most 1,024"),
        ({"logit_bias": 5}, "logit_bias", "`logit_bias` is 5"),
        ({"stop_token_ids": [1, MODEL.vocab_size]}, "stop_token_ids[1]", f"expected a token id from 0 to {LAST}"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "`stop_token_ids[0]` is -1"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", '`stop_token_ids[0]` is "a"'),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "`stop_token_ids` has 65 elements: expected at most 64"),
        (
            {"structured_outputs": {}},
            "structured_outputs",
            "has 0 members: expected exactly one of json, json_object, regex, choice, grammar",
        ),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "has 0"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "has 2"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length >= 1"),
        ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice[1]", "is 5"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "length >= 1"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "is 5"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "not an object"),
        ({"structured_outputs": {"json": "[" * 100_000}}, "structured_outputs.json", "not valid JSON"),
        ({"structured_outputs": {"whitespace": "x"}}, "structured_outputs.whitespace", "unknown field"),
        ({"structured_outputs": {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}}, "structured_outputs", "over the limit of 262,144 bytes"),
        ({"structured_outputs": {"json": {"const": "ä" * 140_000}}}, "structured_outputs", "over the limit"),
    ],
)
async def test_what_both_endpoints_refuse(fields: dict[str, Any], param: str, says: str) -> None:
    for ask in (completion, chat):
        with pytest.raises(RequestError) as caught:
            await ask(**fields)
        assert caught.value.param == param
        assert says in caught.value.message
        assert caught.value.status == 400


async def test_a_grammar_that_many_choices_need_is_bounded_in_all() -> None:
    grammar = {"regex": "a" * 100_000}
    assert len((await completion(structured_outputs=grammar, prompt=["x"] * 2, n=128)).submits) == 256
    with pytest.raises(RequestError, match=r"100,000 bytes for each of 2,048 choices: expected at most 33,554,432 for all") as caught:
        await completion(structured_outputs=grammar, prompt=["x"] * 16, n=128)
    assert (caught.value.param, caught.value.status) == ("structured_outputs", 400)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "expected one of text, json_object, json_schema"),
        ({"response_format": {}}, "response_format.type", "required"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required with `type` json_schema"),
        (
            {"response_format": {"type": "text", "json_schema": FORMAT["json_schema"]}},
            "response_format.json_schema",
            "not allowed with another type",
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema", "required"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 5}}},
            "response_format.json_schema.schema",
            "is 5: expected `object`",
        ),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs", "cannot be combined"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs", "cannot be combined"),
    ],
)
async def test_what_chat_refuses(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        await chat(**fields)
    assert caught.value.param == param
    assert says in caught.value.message


async def test_a_schema_as_deep_as_the_decoder_takes_it_is_no_crash() -> None:
    schema = '{"a":' * 900 + "5" + "}" * 900
    body = b'{"model": "m", "prompt": "x", "structured_outputs": {"json": ' + schema.encode() + b"}}"
    try:
        incoming, library = await request({})
        await parse_completion(Incoming(body, [], incoming.tenant), library)
    except RequestError as error:
        assert error.status == 400


async def test_the_choices_of_a_long_prompt_share_it_under_one_name() -> None:
    long, other, short = list(range(40)), list(range(1, 41)), [1, 2, 3]
    plan = await completion(prompt=[long, other, short], n=3)
    names = [submit.prompt for submit in plan.submits]
    assert names == [plan.submits[0].id] * 3 + [plan.submits[3].id] * 3 + [b""] * 3
    assert len({id(submit.token_ids) for submit in plan.submits[:3]}) == 1
    assert [submit.prompt for submit in (await completion(prompt=long)).submits] == [b""], "one generation shares nothing"


def test_marks_of_images_are_no_long_text() -> None:
    refs = [ImageRef("messages[0].content[0]")] * 400
    content = "".join([image_mark(index) for index in range(len(refs))])
    prompt = ChatPrompt([ChatMessage(role="user", content=content)])
    model = ServedModel(structs.replace(MODEL, context_length=500), WordTokenizer())
    given = Chat(prompt=prompt, fields=["messages[0]"], max_tokens=None, images=refs)
    check_lengths(model, given)
    with pytest.raises(RequestError, match="context length is 500"):
        check_lengths(model, structs.replace(given, images=()))
