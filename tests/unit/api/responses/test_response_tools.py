"""Which tools the model sees, and which it must call."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.api.pipeline.plan import ToolChoice
from penstock.api.responses.items import read_tools
from penstock.api.responses.schema import HOSTED_TOOLS
from penstock.wire.errors import RequestError

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}, "strict": True}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edits.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"},
}


def names(tools: Any) -> list[str]:
    return [tool["function"]["name"] for tool in tools.offered]


def test_functions_and_custom_tools() -> None:
    tools = read_tools([LOOK, PATCH], None)
    look, patch = (tool["function"] for tool in tools.offered)
    assert look["parameters"] == LOOK["parameters"]
    assert patch["parameters"]["required"] == ["input"]
    assert "start: A" in patch["description"]
    assert tools.custom == {"patch"}
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
        ([{**LOOK, "defer_loading": True}], None, "tools[0].defer_loading"),
        ([{**PATCH, "format": {"type": "yaml"}}], None, "tools[0].format.type"),
        ([LOOK], "always", "tool_choice"),
        ([LOOK], {"type": "function", "name": "leap"}, "tool_choice"),
        ([LOOK], {"type": "custom", "name": "look"}, "tool_choice"),
        ([LOOK], {"type": "telepathy"}, "tool_choice.type"),
        ([LOOK], {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "leap"}]}, "tool_choice.tools[0]"),
        ([LOOK], {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}, "tool_choice.tools[0]"),
        ([LOOK], {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}]}, "tool_choice"),
        ([LOOK], {"type": "allowed_tools", "mode": "none", "tools": []}, "tool_choice.mode"),
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
