"""Which tools the model sees, and which it must call."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.api.pipeline.plan import ToolChoice
from penstock.api.responses.items import Messages, read_items
from penstock.api.responses.schema import HOSTED_TOOLS
from penstock.api.responses.tools import CalledTool, Tools, read_tools
from penstock.text.formats.calls import MAX_NAME_CHARACTERS
from penstock.wire.errors import RequestError

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}, "strict": True}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"},
}


DEPTH = {"type": "function", "name": "depth", "description": "How deep it is."}
DAM = {"type": "namespace", "name": "mcp__dam", "description": "All about one dam.", "tools": [DEPTH, PATCH]}


def names(tools: Tools) -> list[str]:
    return [tool["function"]["name"] for tool in tools.offered]


def test_functions_and_custom_tools() -> None:
    tools = read_tools([LOOK, PATCH], None)
    look, patch = (tool["function"] for tool in tools.offered)
    assert look["parameters"] == LOOK["parameters"]
    assert patch["parameters"]["required"] == ["input"]
    assert "start: A" in patch["description"]
    assert {name: tool.is_custom for name, tool in tools.called.items()} == {"look": False, "patch": True}
    assert tools.choice == ToolChoice("auto")
    assert tools.shown == [{"description": None, **LOOK}, PATCH]


@pytest.mark.parametrize("kind", sorted(HOSTED_TOOLS))
def test_hosted_tools_are_dropped_unless_one_is_forced(kind: str) -> None:
    tools = read_tools([{"type": kind, "search_context_size": "low"}, LOOK], "auto")
    assert names(tools) == ["look"]
    assert [tool["name"] for tool in tools.shown] == ["look"]
    with pytest.raises(RequestError, match=kind) as caught:
        read_tools([{"type": kind}, LOOK], {"type": kind})
    assert caught.value.param == "tool_choice.type"


def test_choices() -> None:
    assert read_tools([LOOK], "required").choice == ToolChoice("required")
    assert read_tools([LOOK], {"type": "function", "name": "look"}).choice == ToolChoice("named", "look")
    assert read_tools([PATCH], {"type": "custom", "name": "patch"}).choice == ToolChoice("named", "patch")
    none = read_tools([LOOK], "none")
    assert (none.offered, none.choice.mode) == ([], "none")


def test_allowed_tools() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}, {"type": "web_search"}]}
    tools = read_tools([LOOK, PATCH], allowed)
    assert names(tools) == ["patch"]
    assert tools.choice == ToolChoice("required")
    assert len(tools.shown) == 2


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "telepathy"}], None, "tools[0].type"),
        ([{"name": "a"}], None, "tools[0].type"),
        ([{"type": "function"}], None, "tools[0].name"),
        ([{"type": "function", "name": "a b"}], None, "tools[0].name"),
        ([LOOK, LOOK], None, "tools[1].name"),
        ([{**LOOK, "color": "red"}], None, "tools[0].color"),
        ([{**LOOK, "defer_loading": "later"}], None, "tools[0].defer_loading"),
        ([{**PATCH, "format": {"type": "yaml"}}], None, "tools[0].format.type"),
        ([LOOK], "always", "tool_choice"),
        ([LOOK], {"type": "function", "name": "leap"}, "tool_choice"),
        ([LOOK], {"type": "custom", "name": "look"}, "tool_choice"),
        ([LOOK], {"type": "telepathy"}, "tool_choice.type"),
        ([LOOK], {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "leap"}]}, "tool_choice.tools[0]"),
        ([LOOK], {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}, "tool_choice.tools[0].name"),
        ([LOOK], {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}]}, "tool_choice"),
        ([LOOK], {"type": "allowed_tools", "mode": "none", "tools": []}, "tool_choice.mode"),
        ([{**DAM, "tools": None}], None, "tools[0].tools"),
        ([{**DAM, "name": "a b"}], None, "tools[0].name"),
        ([{**DAM, "tools": [LOOK, {"type": "function"}]}], None, "tools[0].tools[1].name"),
        ([{**DAM, "tools": [DAM]}], None, "tools[0].tools[0].type"),
        ([LOOK, {**DAM, "tools": [DEPTH, DEPTH]}], None, "tools[1].tools[1].name"),
        ([DAM, {**DAM, "tools": [DEPTH]}], None, "tools[1].tools[0].name"),
        ([{**DAM, "tools": [{**LOOK, "name": f"look{n}"} for n in range(1024)]}, LOOK], None, "tools"),
        ([DAM], {"type": "function", "name": "depth", "namespace": "mcp__dom"}, "tool_choice"),
        ([DAM, {**DAM, "name": "crm"}], {"type": "function", "name": "depth"}, "tool_choice"),
        ([DAM], {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "crm"}]}, "tool_choice.tools[0].name"),
        ([DAM], {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace"}]}, "tool_choice.tools[0].name"),
    ],
)
def test_errors_name_the_field(tools: list[dict[str, Any]], choice: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_tools(tools, choice)
    assert caught.value.param == param
    assert f"`{param}" in caught.value.message


def test_depth() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"properties": deep}
    with pytest.raises(RequestError, match="nested"):
        read_tools([{**LOOK, "parameters": deep}], None)


def test_the_model_knows_a_tool_in_a_namespace_by_one_name() -> None:
    tools = read_tools([LOOK, DAM, {"type": "namespace", "name": "crm__", "tools": [DEPTH, {"type": "web_search"}]}], None)
    assert names(tools) == ["look", "mcp__dam__depth", "mcp__dam__patch", "crm__depth"]
    assert tools.called["mcp__dam__depth"] == CalledTool("depth", "mcp__dam")
    assert tools.called["mcp__dam__patch"] == CalledTool("patch", "mcp__dam", is_custom=True)
    assert tools.offered[1]["function"]["description"] == "All about one dam.\n\nHow deep it is."
    assert "All about" not in tools.offered[2]["function"]["description"]
    assert tools.shown[1]["name"] == "mcp__dam"
    assert [tool["name"] for tool in tools.shown[1]["tools"]] == ["depth", "patch"]


def test_a_tool_that_openai_would_search_for_is_offered_at_once() -> None:
    assert names(read_tools([{"type": "tool_search"}, {**DAM, "tools": [{**DEPTH, "defer_loading": True}]}], None)) == ["mcp__dam__depth"]


def history(tools: Tools, *calls: tuple[str | None, str]) -> list[str]:
    """The names that the model reads in its earlier calls."""
    given = [{"type": "function_call", "call_id": "c", "name": name, "namespace": space, "arguments": "{}"} for space, name in calls]
    chat = Messages(names=tools.names)
    chat.add(read_items("input", given), ["input"] * len(given))
    return [call["function"]["name"] for call in chat.messages[0]["tool_calls"]]


def test_earlier_calls_have_the_names_that_the_model_wrote() -> None:
    tools = read_tools([LOOK, DAM], None)
    assert history(tools, (None, "look"), ("mcp__dam", "depth")) == ["look", "mcp__dam__depth"]
    without = read_tools([], None)
    assert history(without, (None, "look"), ("mcp__dam", "depth"), ("", "look")) == ["look", "mcp__dam__depth", "look"]


def test_two_tools_never_share_a_name() -> None:
    a = {"type": "namespace", "name": "a", "tools": [{**LOOK, "name": "b__c"}]}
    b = {"type": "namespace", "name": "a__b", "tools": [{**LOOK, "name": "c"}]}
    tools = read_tools([a, b, {**LOOK, "name": "a__b__c"}], None)
    assert names(tools) == ["a__b__c_2", "a__b__c_3", "a__b__c"]
    assert [tools.called[name][:2] for name in names(tools)] == [("b__c", "a"), ("c", "a__b"), ("a__b__c", None)]
    assert history(tools, ("a", "b__c"), ("a__b", "c"), (None, "a__b__c")) == names(tools)


def test_a_choice_that_is_nested_too_deeply_to_be_repeated_is_refused() -> None:
    extra: list[Any] = []
    for _ in range(64):
        extra = [extra]
    with pytest.raises(RequestError, match="`tool_choice` is nested more than 64 levels deep"):
        read_tools([LOOK], {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look", "extra": extra}]})


def test_long_names_that_clash_are_numbered_in_one_pass() -> None:
    """All begin alike, so that each number is taken already by another name."""
    long = ["x" * (MAX_NAME_CHARACTERS - 6) + f"{number:03}" for number in range(500)]
    outside = [{**LOOK, "name": f"a__{name}"} for name in long]
    inside = {"type": "namespace", "name": "a", "tools": [{**LOOK, "name": name} for name in long]}
    tools = read_tools([*outside, inside], None)
    assert len(set(names(tools))) == 1000
    assert max(map(len, names(tools))) == MAX_NAME_CHARACTERS
    assert names(tools)[-1].endswith("_501"), "one number for each, none is tried twice"


def test_names_that_are_too_long_together_are_cut_and_stay_apart() -> None:
    inside = [{**LOOK, "name": "x" * 200 + end} for end in "ab"]
    tools = read_tools([{"type": "namespace", "name": "n" * 200, "tools": inside}], None)
    assert len(set(names(tools))) == 2
    assert {len(name) for name in names(tools)} == {MAX_NAME_CHARACTERS}
    # Without the tools, the same: the name depends on nothing else.
    calls = [("n" * 200, str(tool["name"])) for tool in inside]
    assert history(read_tools([], None), *calls) == history(tools, *calls) == names(tools)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "depth", "namespace": "mcp__dam"},
        {"type": "function", "name": "depth"},
        {"type": "function", "name": "mcp__dam__depth"},
    ],
)
def test_a_choice_names_a_tool_in_a_namespace(choice: dict[str, str]) -> None:
    assert read_tools([LOOK, DAM], choice).choice == ToolChoice("named", "mcp__dam__depth")
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    assert names(read_tools([LOOK, DAM], allowed)) == ["mcp__dam__depth"]


def test_a_choice_without_a_namespace_means_the_tool_outside() -> None:
    inside = {"type": "namespace", "name": "mcp__dam", "tools": [LOOK]}
    assert read_tools([inside, LOOK], {"type": "function", "name": "look"}).choice == ToolChoice("named", "look")
    named = {"type": "function", "name": "look", "namespace": "mcp__dam"}
    assert read_tools([inside, LOOK], named).choice == ToolChoice("named", "mcp__dam__look")


def test_a_namespace_is_allowed() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "mcp__dam"}]}
    tools = read_tools([LOOK, DAM], allowed)
    assert names(tools) == ["mcp__dam__depth", "mcp__dam__patch"]
