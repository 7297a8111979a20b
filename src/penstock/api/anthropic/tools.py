"""A request's tools: which are described before all messages, which where a message names them, and which the model can call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec

from penstock.api.anthropic.schema import DefinedTool, NamedTool, Tool
from penstock.api.openai.schema import MAX_TOOLS
from penstock.api.pipeline.plan import check_names, check_size, described_tool
from penstock.wire.errors import RequestError


class Tools:
    """Deferred tools are described in the messages that name them. What comes before stays as it was, and its KV can be used again.

    `head` is described before all messages. A tool is described once: many messages may name it.
    """

    def __init__(self, tools: Sequence[Tool], added: AbstractSet[str] = frozenset()) -> None:
        """`added`: tools that a message adds before any removes them."""
        described = {each["function"]["name"]: each for each in described_tools(tools)}
        deferred = {tool.name for tool in tools if tool.defer_loading or tool.name in added} & described.keys()
        # Only with tools at the head does a chat template say how to call one. Without the servers' search, all tools must be seen.
        is_all = len(deferred) == len(described) or len(described) < len(tools)
        self._deferred = {} if is_all else {name: described[name] for name in deferred}
        self.head = [tool for name, tool in described.items() if name not in self._deferred]
        self._described = described.keys() - self._deferred.keys()
        self.later: dict[str, dict[str, Any]] = {}
        """The tools that messages describe, by name."""
        self.removed: set[str] = set()

    def add(self, field: str, tools: Sequence[NamedTool | DefinedTool]) -> str:
        """What a message says that adds these tools."""
        new: list[str] = []
        known: list[str] = []
        for tool in tools:
            name = tool.name if isinstance(tool, NamedTool) else tool.definition.name
            self.removed.discard(name)
            added = self._deferred.pop(name, None) if isinstance(tool, NamedTool) else _defined(tool.definition, field)
            if added is not None:
                self.later[name] = added
                check_size("tools", len(self.head) + len(self.later), MAX_TOOLS, "tools, with those that messages add")
                new.append(_written(added))
            else:
                is_known = name in self._described or name in self.later
                known.append(f"The tool {name} can be called." if is_known else f"There is no tool {name}.")
        return "\n".join([*(["<functions>", *new, "</functions>"] if new else []), *known])

    def remove(self, name: str) -> str:
        """What a message says that removes this tool. Its description stays where it is."""
        self.removed.add(name)
        return f"The tool {name} cannot be called any more."


def described_tools(tools: Sequence[Tool], field: str = "tools[{}]") -> list[dict[str, Any]]:
    """The tools as chat templates expect them, without searches for tools. Raises RequestError when two have the same name."""
    check_names([tool.name for tool in tools], f"{field}.name")
    for index, tool in enumerate(tools):
        if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
            param = f"{field.format(index)}.allowed_callers"
            raise RequestError(
                f"`{param}` has no `direct`: expected it in the list; on this server, only the model calls tools", param=param
            )
        if tool.input_schema is None and tool.type in (None, "custom"):
            param = f"{field.format(index)}.input_schema"
            raise RequestError(f"`{param}` is required", param=param, code="missing_field")
    return [described_tool(tool.name, _description(tool), tool.input_schema) for tool in tools if tool.type in (None, "custom")]


def _defined(tool: Tool, field: str) -> dict[str, Any]:
    """A tool that a message defines."""
    described = described_tools([tool], field)
    if not described:
        param = f"{field}.type"
        raise RequestError(f"`{param}` is {tool.type!r}: expected a tool with `name` and `input_schema`", param=param)
    return described[0]


def _description(tool: Tool) -> str:
    examples = [msgspec.json.encode(example).decode() for example in tool.input_examples or ()]
    return "\n".join([tool.description or "", *(["Examples of its input:"] if examples else []), *examples]).strip()


def _written(tool: Mapping[str, Any]) -> str:
    """As Claude Code's own tool search announces them to the model."""
    function = tool["function"]
    fields = {name: function[name] for name in ("description", "name", "parameters")}
    return f"<function>{msgspec.json.encode(fields).decode()}</function>"
