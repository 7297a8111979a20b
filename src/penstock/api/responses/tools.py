"""The tools of a request: which of them the model is told of, and which it may or must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from penstock.api.pipeline.plan import NO_PARAMETERS, ToolChoice, described_tool
from penstock.api.responses.items import check_depth, read_struct
from penstock.api.responses.messages import CUSTOM_ARGUMENT
from penstock.api.responses.schema import HOSTED_TOOLS, AllowedTools, CustomTool, FunctionTool, NamedChoice
from penstock.wire.errors import RequestError

_MODES = ("auto", "none", "required")


@dataclass(frozen=True)
class Tools:
    """`offered` are as chat templates expect them, `shown` as the answer repeats them; `custom` names those whose input is any text."""

    offered: Sequence[Mapping[str, Any]]
    shown: list[dict[str, Any]]
    custom: frozenset[str]
    choice: ToolChoice


def read_tools(tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> Tools:
    """Raises RequestError that names what is wrong.

    Tools that OpenAI runs are left out: agents send them whether they need them or not. Forcing one is refused.
    """
    known: dict[str, FunctionTool | CustomTool] = {}
    for index, tool in enumerate(tools or ()):
        read = _read_tool(f"tools[{index}]", tool)
        if read is None:
            continue
        if read.name in known:
            field = f"tools[{index}].name"
            raise RequestError(f"`{field}` is {read.name!r}: another tool has that name already", param=field)
        known[read.name] = read
    wanted, allowed = _read_choice(choice, known)
    # With the choice none the model is not even told of them.
    offered = [] if wanted.mode == "none" else [_described(tool) for name, tool in known.items() if allowed is None or name in allowed]
    return Tools(
        offered=offered,
        shown=[_shown(tool) for tool in known.values()],
        custom=frozenset(name for name, tool in known.items() if isinstance(tool, CustomTool)),
        choice=wanted,
    )


def _read_tool(field: str, tool: dict[str, Any]) -> FunctionTool | CustomTool | None:
    """None for a tool that OpenAI runs."""
    kind = tool.get("type")
    if isinstance(kind, str) and kind in HOSTED_TOOLS:
        return None
    check_depth(field, tool)
    if kind == "function":
        return read_struct(field, tool, FunctionTool)
    if kind == "custom":
        return read_struct(field, tool, CustomTool)
    if kind is None:
        raise RequestError(f"`{field}.type` is required", param=f"{field}.type", code="missing_field")
    shown = msgspec.json.encode(kind)[:80].decode(errors="replace")
    raise RequestError(f"`{field}.type` is {shown}: expected function or custom", param=f"{field}.type")


def _read_choice(choice: str | dict[str, Any] | None, known: Mapping[str, FunctionTool | CustomTool]) -> tuple[ToolChoice, set[str] | None]:
    """The choice, and, where it leaves some out, the names of the tools that may be called."""
    if choice is None:
        return ToolChoice(), None
    if isinstance(choice, str):
        if choice not in _MODES:
            expected = f"expected one of {', '.join(_MODES)}, or an object that names a tool"
            raise RequestError(f"`tool_choice` is {choice[:80]!r}: {expected}", param="tool_choice")
        return ToolChoice(cast(Any, choice)), None
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _allowed(read_struct("tool_choice", choice, AllowedTools), known)
    if isinstance(kind, str) and kind in HOSTED_TOOLS:
        raise _hosted("tool_choice.type", kind)
    named = read_struct("tool_choice", choice, NamedChoice)
    _check_known("tool_choice", named.type, named.name, known)
    return ToolChoice("named", named.name), None


def _allowed(allowed: AllowedTools, known: Mapping[str, FunctionTool | CustomTool]) -> tuple[ToolChoice, set[str]]:
    names: set[str] = set()
    for index, tool in enumerate(allowed.tools):
        field = f"tool_choice.tools[{index}]"
        kind, name = tool.get("type"), tool.get("name")
        if isinstance(kind, str) and kind in HOSTED_TOOLS:
            continue
        if kind not in ("function", "custom") or not isinstance(name, str):
            raise RequestError(f"`{field}`: expected the type, function or custom, and the name of a tool", param=field)
        _check_known(field, kind, name, known)
        names.add(name)
    if allowed.mode == "required" and not names:
        raise RequestError("`tool_choice` is required: none of its `tools` can be called here", param="tool_choice")
    return ToolChoice(allowed.mode), names


def _check_known(field: str, kind: str, name: str, known: Mapping[str, FunctionTool | CustomTool]) -> None:
    if name not in known or known[name].type != kind:
        tools = ", ".join(f"{tool.type} `{known_name}`" for known_name, tool in known.items()) or "none"
        raise RequestError(f"`{field}` names the {kind} {name[:80]!r}: the tools are {tools}", param=field)


def _hosted(field: str, kind: str) -> RequestError:
    return RequestError(
        f"`{field}` is {kind!r}: this server has no such tool; expected function or custom", param=field, code="unsupported_tool"
    )


def _described(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    if isinstance(tool, FunctionTool):
        return described_tool(tool.name, tool.description, tool.parameters)
    text = {"type": "string", "description": "The input of the tool, as plain text."}
    properties = {CUSTOM_ARGUMENT: text}
    parameters = {"type": "object", "properties": properties, "required": [CUSTOM_ARGUMENT], "additionalProperties": False}
    return described_tool(tool.name, _with_grammar(tool), parameters)


def _with_grammar(tool: CustomTool) -> str:
    description, wanted = tool.description or "", tool.format
    if wanted is None or wanted.type == "text" or wanted.definition is None:
        return description
    return f"{description}\nThe input must match this {wanted.syntax or 'lark'} grammar:\n{wanted.definition}".lstrip()


def _shown(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    shown = {name: value for name, value in cast(dict[str, Any], msgspec.to_builtins(tool)).items() if value is not None}
    if isinstance(tool, FunctionTool):
        return {"description": None, "parameters": dict(NO_PARAMETERS), "strict": False, **shown}
    return {"format": {"type": "text"}, **shown}
