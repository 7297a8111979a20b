"""The tools of a request: what the model is offered, each under one name, and how a call of it is given back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import msgspec

from penstock.api.openai.schema import MAX_TOOLS
from penstock.api.pipeline.plan import NO_PARAMETERS, ToolChoice, check_size, described_tool
from penstock.api.responses.items import CUSTOM_ARGUMENT, ToolNames, check_depth, known_name, read_struct
from penstock.api.responses.schema import HOSTED_TOOLS, AllowedTools, CustomTool, FunctionTool, NamedChoice, NamespaceTool
from penstock.text.formats.calls import MAX_NAME_CHARACTERS
from penstock.wire.errors import RequestError

_TOOL_CHOICES = ("auto", "none", "required")

AnyTool = FunctionTool | CustomTool


class CalledTool(NamedTuple):
    """A tool as the client calls it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True)
class Tools:
    """`offered`: for the chat template. `shown`: for the answer. `names`: the names that the model knows. `called`: the tools, by these."""

    offered: Sequence[Mapping[str, Any]]
    shown: list[dict[str, Any]]
    names: ToolNames
    called: Mapping[str, CalledTool]
    choice: ToolChoice


class _Known(NamedTuple):
    """A tool that can be called. `space` is the namespace that it is in."""

    field: str
    tool: AnyTool
    space: NamespaceTool | None

    @property
    def namespace(self) -> str | None:
        return None if self.space is None else self.space.name


def read_tools(tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> Tools:
    """Raises RequestError that names the wrong field.

    The model knows a tool in a namespace by one name, made of both. Tools that OpenAI runs are dropped: agents send them even if they do
    not need them. Forcing one is an error.
    """
    read: list[_Known] = []
    shown = [one for index, tool in enumerate(tools or ()) if (one := _read_tool(f"tools[{index}]", tool, read)) is not None]
    check_size("tools", len(read), MAX_TOOLS, "tools, with those in namespaces")
    names = _names(read)
    known = {names[each.namespace, each.tool.name]: each for each in read}
    wanted, allowed = _read_choice(choice, _Index(known))
    return Tools(
        # With `none`, the model does not see the tools.
        offered=[] if wanted.mode == "none" else list(_offered(known, allowed)),
        shown=shown,
        names=names,
        called={name: CalledTool(each.tool.name, each.namespace, isinstance(each.tool, CustomTool)) for name, each in known.items()},
        choice=wanted,
    )


def _read_tool(field: str, tool: dict[str, Any], read: list[_Known], space: NamespaceTool | None = None) -> dict[str, Any] | None:
    """Adds what can be called to `read`. Returns what the answer shows; None for a tool that OpenAI runs."""
    kind = tool.get("type")
    if isinstance(kind, str) and kind in HOSTED_TOOLS:
        return None
    if space is None:
        check_depth(field, tool)
    if kind == "function":
        read.append(_Known(field, read_struct(field, tool, FunctionTool), space))
        return _shown(read[-1].tool)
    if kind == "custom":
        read.append(_Known(field, read_struct(field, tool, CustomTool), space))
        return _shown(read[-1].tool)
    if kind == "namespace" and space is None:
        space = read_struct(field, tool, NamespaceTool)
        inside = [_read_tool(f"{field}.tools[{index}]", one, read, space) for index, one in enumerate(space.tools)]
        return {"type": kind, "name": space.name, "description": space.description, "tools": [one for one in inside if one is not None]}
    if kind is None:
        raise RequestError(f"`{field}.type` is required", param=f"{field}.type", code="missing_field")
    given = msgspec.json.encode(kind)[:80].decode(errors="replace")
    expected = "function, custom or namespace" if space is None else "function or custom"
    raise RequestError(f"`{field}.type` is {given}: expected {expected}", param=f"{field}.type")


def _names(read: Sequence[_Known]) -> ToolNames:
    """The name of each tool for the model. One that another tool has already gets a number."""
    taken = {each.tool.name for each in read if each.space is None}
    numbers: Counter[str] = Counter()
    names: dict[tuple[str | None, str], str] = {}
    for each in read:
        key = each.namespace, each.tool.name
        if key in names:
            field = f"{each.field}.name"
            raise RequestError(f"`{field}` is {each.tool.name!r}: another tool has the same name", param=field)
        name = known_name(*key)
        names[key] = name if each.space is None else _free_name(name, taken, numbers)
        taken.add(names[key])
    return names


def _free_name(name: str, taken: set[str], numbers: Counter[str]) -> str:
    """`numbers` has the last number that was tried for each beginning of a name: none is tried twice."""
    free, beginning = name, name[: MAX_NAME_CHARACTERS - 5]
    while free in taken:
        numbers[beginning] += 1
        free = f"{beginning}_{numbers[beginning] + 1}"
    return free


def _offered(known: Mapping[str, _Known], allowed: set[str] | None) -> Iterator[dict[str, Any]]:
    """Templates have no namespaces: the first tool of each also has the namespace's description."""
    described: set[str | None] = {None}
    for name, (_, tool, space) in known.items():
        if allowed is not None and name not in allowed:
            continue
        about = "" if space is None or space.name in described else space.description or ""
        described.add(None if space is None else space.name)
        yield _described(name, tool, about)


def _read_choice(choice: str | dict[str, Any] | None, index: _Index) -> tuple[ToolChoice, set[str] | None]:
    """The choice, and the names of the tools that may be called; None: all."""
    if choice is None:
        return ToolChoice(), None
    if isinstance(choice, str):
        if choice not in _TOOL_CHOICES:
            expected = f"expected one of {', '.join(_TOOL_CHOICES)}, or an object that names a tool"
            raise RequestError(f"`tool_choice` is {choice[:80]!r}: {expected}", param="tool_choice")
        return ToolChoice(cast(Any, choice)), None
    # The answer repeats it.
    check_depth("tool_choice", choice)
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _allowed(read_struct("tool_choice", choice, AllowedTools), index)
    if isinstance(kind, str) and kind in HOSTED_TOOLS:
        message = f"`tool_choice.type` is {kind!r}: this server has no such tool; expected function or custom"
        raise RequestError(message, param="tool_choice.type", code="unsupported_tool")
    return ToolChoice("named", index.find("tool_choice", read_struct("tool_choice", choice, NamedChoice))), None


def _allowed(allowed: AllowedTools, index: _Index) -> tuple[ToolChoice, set[str]]:
    names: set[str] = set()
    spaces: set[str] = set()
    for number, tool in enumerate(allowed.tools):
        field = f"tool_choice.tools[{number}]"
        kind = tool.get("type")
        if kind == "namespace":
            spaces.add(index.namespace(field, tool.get("name")))
        elif not isinstance(kind, str) or kind not in HOSTED_TOOLS:
            named = {name: tool[name] for name in NamedChoice.__struct_fields__ if name in tool}
            names.add(index.find(field, read_struct(field, named, NamedChoice)))
    names |= {name for name, each in index.known.items() if each.namespace in spaces}
    if allowed.mode == "required" and not names:
        raise RequestError(
            "`tool_choice.mode` is 'required': expected at least one function or custom tool in `tool_choice.tools`", param="tool_choice"
        )
    return ToolChoice(allowed.mode), names


class _Index:
    """Finds the tools that a choice names. `known` has them by the model's names."""

    def __init__(self, known: Mapping[str, _Known]) -> None:
        self.known = known
        self._exact = {(each.tool.type, each.namespace, each.tool.name): name for name, each in known.items()}
        self._spaces = {each.namespace for each in known.values()}
        self._loose: dict[tuple[str, str], list[str]] = {}
        """The names in namespaces, and the model's names."""
        for name, each in known.items():
            for given in {name, each.tool.name}:
                self._loose.setdefault((each.tool.type, given), []).append(name)

    def find(self, field: str, named: NamedChoice) -> str:
        """The model's name of the tool. Its namespace may be left out if no other tool has the name. Raises RequestError."""
        if (exact := self._exact.get((named.type, named.namespace, named.name))) is not None:
            return exact
        fitting = self._loose.get((named.type, named.name), []) if named.namespace is None else []
        if len(fitting) == 1:
            return fitting[0]
        wrong = f"`{field}` names the {named.type} {named.name[:80]!r}"
        if fitting:
            spaces = ", ".join(f"`{self.known[name].namespace}`" for name in fitting)
            raise RequestError(f"{wrong}: it is in the namespaces {spaces}; name one of them as `namespace`", param=field)
        tools = ", ".join(f"{each.tool.type} `{name}`" for name, each in self.known.items()) or "none"
        raise RequestError(f"{wrong}: the tools are {tools}", param=field)

    def namespace(self, field: str, name: object) -> str:
        """The name, if there is such a namespace. Raises RequestError."""
        if isinstance(name, str) and name in self._spaces:
            return name
        shown = repr(name[:80]) if isinstance(name, str) else "not a string"
        raise RequestError(f"`{field}.name` is {shown}: expected a namespace of the `tools`", param=f"{field}.name")


def _described(name: str, tool: AnyTool, about: str) -> dict[str, Any]:
    """`about` describes the tool's namespace."""
    if isinstance(tool, FunctionTool):
        return described_tool(name, _joined(about, tool.description), tool.parameters)
    text = {"type": "string", "description": "The input of the tool, as plain text."}
    properties = {CUSTOM_ARGUMENT: text}
    parameters = {"type": "object", "properties": properties, "required": [CUSTOM_ARGUMENT], "additionalProperties": False}
    return described_tool(name, _joined(about, _with_grammar(tool)), parameters)


def _joined(about: str, description: str | None) -> str | None:
    return f"{about}\n\n{description or ''}".rstrip() if about else description


def _with_grammar(tool: CustomTool) -> str:
    description, wanted = tool.description or "", tool.format
    if wanted is None or wanted.type == "text" or wanted.definition is None:
        return description
    return f"{description}\nThe input must match this {wanted.syntax or 'lark'} grammar:\n{wanted.definition}".lstrip()


def _shown(tool: AnyTool) -> dict[str, Any]:
    shown = {name: value for name, value in cast(dict[str, Any], msgspec.to_builtins(tool)).items() if value is not None}
    if isinstance(tool, FunctionTool):
        return {"description": None, "parameters": dict(NO_PARAMETERS), "strict": False, **shown}
    return {"format": {"type": "text"}, **shown}
