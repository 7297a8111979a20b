"""Tools and tool calls as text, for models whose chat template does not render them. The format is the most common one: `hermes`.

A call is `<tool_call>`, JSON with `name` and `arguments`, `</tool_call>`, as `penstock.text.formats` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from penstock.text.tokenizers.tokenizer import ChatMessage, ToolCall

_BEFORE = """\
You can call tools. These are the ones there are, each described by a JSON object:
<tools>
"""
_AFTER = """
</tools>
To call a tool, write a JSON object with its name and its arguments, in the tags shown here; for several calls, several of them:
<tool_call>
{"name": "the tool's name", "arguments": {"an argument's name": "its value"}}
</tool_call>
The results will come in <tool_response> tags. Answer without a call where no tool is needed."""


def describe_tools(tools: Iterable[Mapping[str, Any]]) -> str:
    """Describes the tools, and how to call them, to the model."""
    return _BEFORE + "\n".join([_json(tool) for tool in tools]) + _AFTER


def calls_text(calls: Iterable[ToolCall]) -> str:
    """Calls as the model writes them."""
    written = [_json({"name": call["function"]["name"], "arguments": call["function"]["arguments"]}) for call in calls]
    return "\n".join([f"<tool_call>\n{call}\n</tool_call>" for call in written])


def tools_in_system(messages: Sequence[ChatMessage], tools: Iterable[Mapping[str, Any]]) -> Sequence[ChatMessage]:
    """The messages with the tools described at the end of the system message, which is added if it is missing."""
    described = describe_tools(tools)
    if messages and messages[0]["role"] == "system":
        first, *rest = messages
        return [ChatMessage({**first, "content": paragraphs(first["content"], described)}), *rest]
    return [ChatMessage(role="system", content=described), *messages]


def calls_as_text(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    """The messages with calls as text in the assistant's content, and tool results in user messages."""
    if not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        return messages
    changed: list[ChatMessage] = []
    for is_tool, group in groupby(messages, lambda message: message["role"] == "tool"):
        if is_tool:
            responses = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            changed.append(ChatMessage(role="user", content="\n".join(responses)))
        else:
            changed += [_written_out(message) for message in group]
    return changed


def _written_out(message: ChatMessage) -> ChatMessage:
    calls = message.get("tool_calls")
    if not calls:
        return message
    text = calls_text(calls)
    kept = ChatMessage({**message, "content": f"{message['content']}\n{text}" if message["content"] else text})
    del kept["tool_calls"]
    return kept


def paragraphs(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
