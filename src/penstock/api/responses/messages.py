"""Items as the messages of a chat, which is what templates are written for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from penstock.api.openai.chat import tool_call
from penstock.api.responses.items import Item
from penstock.text.tokenizers.tokenizer import ChatMessage

CUSTOM_ARGUMENT = "input"
"""The one argument of the function that a custom tool is to the model."""


class Messages:
    """The messages of a chat, and for each the field of the request that it comes from.

    What an assistant thinks, says and calls in one go is one message.
    """

    def __init__(self, instructions: str | None = None) -> None:
        self.messages: list[ChatMessage] = []
        self.fields: list[str] = []
        self._answer: ChatMessage | None = None
        """The assistant's message that what comes next may belong to."""
        if instructions is not None:
            self._append("instructions", ChatMessage(role="system", content=instructions))

    def add(self, items: Iterable[Item], fields: Iterable[str]) -> None:
        for item, field in zip(items, fields, strict=True):
            self._add(item, field)

    def _add(self, item: Item, field: str) -> None:
        kind = item["type"]
        if kind == "reasoning":
            self._think(_joined(item.get("content") or ()), field)
        elif kind == "message":
            self._say(item["role"], _joined(item["content"]), field)
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, field)
        else:
            output = item["output"]
            text = output if isinstance(output, str) else _joined(output)
            self._append(field, ChatMessage(role="tool", content=text, tool_call_id=item["call_id"]))

    def _think(self, text: str, field: str) -> None:
        # Of reasoning that was encrypted elsewhere nothing is left.
        if text:
            self._append(field, ChatMessage(role="assistant", content="", reasoning_content=text), open_to_more=True)

    def _say(self, role: str, text: str, field: str) -> None:
        answer = self._answer
        if role == "assistant" and answer is not None and not answer["content"] and "tool_calls" not in answer:
            answer["content"] = text
        else:
            self._append(field, ChatMessage(role=role, content=text), open_to_more=role == "assistant")

    def _call(self, item: Item, field: str) -> None:
        if self._answer is None:
            self._append(field, ChatMessage(role="assistant", content=""), open_to_more=True)
        assert self._answer is not None
        self._answer.setdefault("tool_calls", []).append(tool_call(item["call_id"], item["name"], _arguments(item)))

    def _append(self, field: str, message: ChatMessage, open_to_more: bool = False) -> None:
        self.messages.append(message)
        self.fields.append(field)
        self._answer = message if open_to_more else None


def cuts(messages: Sequence[ChatMessage], fields: Sequence[str]) -> list[slice]:
    """What can be left out of a chat that is too long: one, two, three … of its oldest messages, but never the instructions or the last.

    It is never cut between a call and its output.
    """
    kept = 1 if fields and fields[0] == "instructions" else 0
    return [slice(kept, index) for index in range(kept + 1, len(messages)) if messages[index]["role"] != "tool"]


def _arguments(item: Item) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return msgspec.json.encode({CUSTOM_ARGUMENT: item["input"]}).decode()


def _joined(parts: Iterable[dict[str, Any]]) -> str:
    return "".join(part.get("text") or part.get("refusal") or "" for part in parts)
