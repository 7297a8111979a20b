"""The route table: the application serves every route of it, and answers what its document says."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import schemathesis
from jsonschema import Draft202012Validator

from front_end import FrontEnd, says
from penstock.api.app import ROUTES
from penstock.api.auth.gate import OPEN_PATHS
from penstock.api.document.openapi import make_document
from penstock.api.document.route import Route
from penstock.api.responses.store import SqliteStore

WITH_EXAMPLES = [route for route in ROUTES if route.example is not None]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(msgspec.json.encode(make_document(ROUTES))))


def strings_at(value: Any, name: str) -> Iterator[str]:
    """Every string that is a member of this name, however deep."""
    if isinstance(value, dict):
        if isinstance(value.get(name), str):
            yield value[name]
        for member in value.values():
            yield from strings_at(member, name)
    elif isinstance(value, list):
        for member in value:
            yield from strings_at(member, name)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
async def test_the_application_serves_every_route(route: Route, tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "responses") as store:
        front_end = FrontEnd(says("x"), responses=store)
        await front_end.send(route.method, route.documented_path.replace("{id}", "m").replace("{item_id}", "x"))
        assert b'"not_found"' not in front_end.body
        assert front_end.status not in (405, 500)


def test_the_gate_opens_the_paths_that_need_no_key() -> None:
    assert {route.path for route in ROUTES if not route.needs_key} == OPEN_PATHS


async def test_a_path_that_no_route_has() -> None:
    front_end = FrontEnd(says("x"))
    for path in ("/", "/v1", "/v1/sessions2", "/v1/responses/a/b", "/v1/messages/batches"):
        await front_end.send("GET", path)
        assert front_end.status == 404
        assert path in front_end.json["error"]["message"]


def test_every_reference_has_a_target(document: dict[str, Any]) -> None:
    references = set(strings_at(document, "$ref"))
    assert len(references) > 50
    names = {reference.removeprefix("#/components/schemas/") for reference in references}
    assert names <= document["components"]["schemas"].keys()
    odd = [name for name in document["components"]["schemas"] if not re.fullmatch(r"([a-z]+\.)?[A-Z][A-Za-z0-9]+", name)]
    assert odd == []


def test_every_operation_has_a_unique_name() -> None:
    names = [route.name for route in ROUTES]
    assert len(set(names)) == len(names)


def test_the_parameters_of_a_path_are_described(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            declared = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
            assert declared == set(re.findall(r"{(.*?)}", path)), path
    (session,) = document["paths"]["/v1/sessions/{id}"]["get"]["parameters"]
    assert (session["name"], session["required"], session["description"]) == ("id", True, "The id. It may contain slashes.")


def test_a_fuzzer_can_read_it(document: dict[str, Any]) -> None:
    schema: Any = schemathesis.openapi.from_dict(document)
    assert {result.ok().label for result in schema.get_all_operations()} == {f"{one.method} {one.documented_path}" for one in ROUTES}


def test_it_has_the_limits_of_the_decoder(document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"type": "integer", "minimum": 1, "maximum": 128} in fields["n"]["anyOf"]
    assert document["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False
    assert document["components"]["schemas"]["ChatRequest"]["required"] == ["model", "messages"]


def test_it_has_the_types_of_list_elements(document: dict[str, Any]) -> None:
    for name in ("ResponseRequest", "Asked"):
        fields = document["components"]["schemas"][name]["properties"]
        kinds = {one for field in ("input", "tools") for one in strings_at(fields[field], "$ref")}
        assert {
            f"#/components/schemas/{kind}"
            for kind in ("MessageItem", "FunctionCallOutputItem", "ReasoningItem", "FunctionTool", "NamespaceTool")
        } <= kinds
    for owner, member, text in (("MessageItem", "content", "TextPart"), ("FunctionCallOutputItem", "output", "OutputPart")):
        parts = document["components"]["schemas"][owner]["properties"][member]
        assert set(strings_at(parts, "$ref")) == {f"#/components/schemas/{kind}" for kind in (text, "responses.ImagePart")}
    assert "openai.ImagePart" in document["components"]["schemas"]
    assert "ImageBlock" in document["components"]["schemas"]
    inside = document["components"]["schemas"]["NamespaceTool"]["properties"]["tools"]
    assert set(strings_at(inside, "$ref")) == {f"#/components/schemas/{kind}" for kind in ("FunctionTool", "CustomTool")}


def test_every_schema_is_valid(document: dict[str, Any]) -> None:
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_descriptions_are_not_indented_and_name_no_source_files(document: dict[str, Any]) -> None:
    for description in strings_at(document, "description"):
        assert "\n " not in description
        assert ".py" not in description


def test_routes_without_a_key_say_so(document: dict[str, Any]) -> None:
    assert document["paths"]["/live"]["get"]["security"] == []
    assert "401" not in document["paths"]["/live"]["get"]["responses"]
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert "security" not in chat
    assert {"400", "401", "404", "429", "503"} <= chat["responses"].keys()
    assert "text/event-stream" in chat["responses"]["200"]["content"]


@pytest.mark.parametrize("route", WITH_EXAMPLES, ids=lambda route: route.name)
def test_examples_are_valid(document: dict[str, Any], route: Route) -> None:
    msgspec.convert(route.example, route.body)
    content = document["paths"][route.path]["post"]["requestBody"]["content"]["application/json"]
    Draft202012Validator({**content["schema"], "components": document["components"]}).validate(content["example"])


def test_every_body_has_an_example() -> None:
    assert [route.path for route in ROUTES if route.body is not None and route.example is None] == []


OPEN = ("AnyItem", "MessageEvent", "ResponseEvent")
"""Their other members depend on their type."""


def exact(document: dict[str, Any], schema: dict[str, Any]) -> Draft202012Validator:
    """Allows no member that the document does not describe."""
    components = copy.deepcopy(document["components"])
    for name, described in components["schemas"].items():
        if "properties" in described and name not in OPEN:
            described["additionalProperties"] = False
    return Draft202012Validator({**schema, "components": components})


FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>'
BODIES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "logprobs": False}, "hello"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "return_token_ids": True, "service_tier": "auto"}, "hello"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": FUNCTION}]}, CALL),
    ("/v1/completions", {"prompt": "x", "n": 2, "echo": True}, "hello"),
    ("/v1/completions", {"prompt": "x", "nvext": {"session_control": {"session_id": "s"}, "extra_fields": ["route"]}}, "hello"),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100}, "hello"),
    ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}]}, "hello"),
    ("/v1/responses", {"input": "x", "instructions": "y", "metadata": {"a": "b"}}, "hello"),
    ("/v1/responses/input_tokens", {"input": "x"}, "hello"),
    ("/tokenize", {"prompt": "x y", "return_token_strs": True}, ""),
    ("/detokenize", {"tokens": [65]}, ""),
]


@pytest.mark.parametrize(("path", "body", "text"), BODIES)
async def test_answers_match_the_document(document: dict[str, Any], path: str, body: dict[str, Any], text: str) -> None:
    front_end = FrontEnd(says(text), tool_parser="hermes")
    await front_end.send("POST", path, json.dumps({"model": "m", **body}).encode())
    assert front_end.status == 200, front_end.body
    described = document["paths"][path]["post"]["responses"]["200"]["content"]
    exact(document, described["application/json"]["schema"]).validate(front_end.json)
    if text == CALL:
        assert front_end.json["choices"][0]["message"]["tool_calls"]
    if "text/event-stream" in described:
        await front_end.send("POST", path, json.dumps({"model": "m", **body, "stream": True}).encode())
        assert len(front_end.events) >= 1
        for event in front_end.events:
            exact(document, described["text/event-stream"]["x-event"]).validate(event)


@pytest.mark.parametrize("headers", [{}, {"anthropic-version": "2023-06-01"}], ids=["plain", "Anthropic"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/v1/sessions", "/live", "/ready"])
async def test_simple_answers_match_the_document(document: dict[str, Any], path: str, headers: dict[str, str]) -> None:
    front_end = FrontEnd(says("x"))
    await front_end.send("GET", path, headers=headers)
    assert front_end.status == 200
    described = document["paths"][re.sub("/m$", "/{id}", path)]["get"]
    exact(document, described["responses"]["200"]["content"]["application/json"]["schema"]).validate(front_end.json)


async def test_conversations_match_the_document(document: dict[str, Any], tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "responses") as store:
        front_end = FrontEnd(says("x"), responses=store)

        async def ask(method: str, path: str, told: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
            await front_end.send(method, path, b"" if body is None else json.dumps(body).encode())
            assert front_end.status == 200, front_end.body
            schema = document["paths"][told][method.lower()]["responses"]["200"]["content"]["application/json"]["schema"]
            exact(document, schema).validate(front_end.json)
            return cast(dict[str, Any], front_end.json)

        item = {"type": "message", "role": "user", "content": "x"}
        base, told = "/v1/conversations", "/v1/conversations/{id}"
        conversation = (await ask("POST", base, base, {"items": [item]}))["id"]
        await ask("GET", f"{base}/{conversation}", told)
        await ask("POST", f"{base}/{conversation}", told, {"metadata": {"a": "b"}})
        added = await ask("POST", f"{base}/{conversation}/items", f"{told}/items", {"items": [item]})
        await ask("GET", f"{base}/{conversation}/items?limit=1", f"{told}/items")
        await ask("GET", f"{base}/{conversation}/items/{added['first_id']}", f"{told}/items/{{item_id}}")
        await ask("DELETE", f"{base}/{conversation}/items/{added['first_id']}", f"{told}/items/{{item_id}}")
        made = await ask("POST", "/v1/responses", "/v1/responses", {"model": "m", "input": "x", "conversation": conversation})
        await ask("GET", f"/v1/responses/{made['id']}", "/v1/responses/{id}")
        await ask("GET", f"/v1/responses/{made['id']}/input_items", "/v1/responses/{id}/input_items")
        await ask("DELETE", f"/v1/responses/{made['id']}", "/v1/responses/{id}")
        await ask("DELETE", f"{base}/{conversation}", told)


@pytest.mark.parametrize("path", [route.path for route in WITH_EXAMPLES])
async def test_errors_match_the_document(document: dict[str, Any], path: str, tmp_path: Path) -> None:
    front_end = FrontEnd(says("x"), responses=SqliteStore(tmp_path / "responses"))
    await front_end.send("POST", path.replace("{id}", "x"), b'{"unheard_of": 1}')
    assert 400 <= front_end.status < 500
    described = document["paths"][path]["post"]["responses"][str(front_end.status)]
    exact(document, described["content"]["application/json"]["schema"]).validate(front_end.json)
    await front_end.send("PUT", path.replace("{id}", "x"))
    assert front_end.status == 405
    assert dict(front_end.sent[0]["headers"])[b"allow"]
    exact(document, described["content"]["application/json"]["schema"]).validate(front_end.json)


async def test_it_is_served() -> None:
    front_end = FrontEnd(says("x"))
    await front_end.send("GET", "/openapi.json")
    assert front_end.status == 200
    assert dict(front_end.sent[0]["headers"])[b"content-type"] == b"application/json"
    assert front_end.json["openapi"] == "3.1.0"
    first = front_end.body
    await front_end.send("GET", "/openapi.json")
    assert front_end.body == first
