"""Output items, made from the parts of an answer, and the numbered events that report them."""

from __future__ import annotations

import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.api.responses.items import CUSTOM_ARGUMENT, Item, new_id
from penstock.api.responses.tools import CalledTool
from penstock.text.output import CallArguments, CallBegin, CallBroken, CallEnd, Part, Reasoning


class Events:
    """Renders the events of one response. Numbers start at 0 and have no gaps."""

    def __init__(self) -> None:
        self.count = 0

    def event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        number = self.count
        self.count += 1
        return encoded_event(kind, number, fields)

    def delta(self, opening: bytes, delta: str, closing: bytes) -> bytes:
        """An event of which everything but its delta and number is already encoded."""
        number = self.count
        self.count += 1
        return b'%b%b%b,"sequence_number":%d}\n\n' % (opening, msgspec.json.encode(delta), closing, number)

    def take_back(self) -> None:
        """The last event was not sent. The next one gets its number."""
        self.count -= 1


def encoded_event(kind: str, number: int, fields: Mapping[str, Any]) -> bytes:
    data = msgspec.json.encode({"type": kind, **fields, "sequence_number": number})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def delta_opening(kind: str, fields: Mapping[str, Any]) -> bytes:
    """The `opening` for `Events.delta`."""
    data = msgspec.json.encode({"type": kind, **fields})
    return b'event: %b\ndata: %b,"delta":' % (kind.encode(), data[:-1])


class Logprobs:
    """Finds the logprobs of the tokens that wrote a text, by their bytes: a parser does not say which tokens wrote what.

    The result does not depend on the chunking of the tokens. A text whose bytes are not found has no logprobs: special tokens that are
    not shown, or bytes that are not UTF-8.
    """

    def __init__(self) -> None:
        self._entries: list[msgspec.Raw] = []
        """Encoded: they are part of several events, of the answer and of what is stored."""
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._written = bytearray()
        self._closed = 0
        """The end of the last complete item."""
        self._sent = 0
        """The end of the last delta."""

    def note(self, entries: Sequence[Item]) -> None:
        """Adds the tokens of a delta."""
        for entry in entries:
            self._entries.append(msgspec.Raw(msgspec.json.encode(entry)))
            self._begins.append(len(self._written))
            self._written += bytes(entry["bytes"])
            self._ends.append(len(self._written))

    def of_delta(self, text: str) -> list[msgspec.Raw]:
        """The logprobs of the newest piece of a message."""
        piece = text.encode()
        start = max(self._sent, self._closed)
        # The piece follows the last one, unless something that is not text came between. Then it is the last occurrence.
        found = start if self._written.startswith(piece, start) else self._written.rfind(piece, start)
        if found < 0:
            return []
        self._sent = found + len(piece)
        return self._between(start, found, self._sent)

    def of_item(self, text: str) -> list[msgspec.Raw]:
        """The logprobs of a complete item with this text. Earlier tokens are not searched again."""
        whole = text.encode()
        start = self._closed
        found = self._written.find(whole, start)
        if found < 0:
            return []
        self._closed = found + len(whole)
        return self._between(start, found, self._closed)

    def _between(self, start: int, begin: int, end: int) -> list[msgspec.Raw]:
        """The tokens with bytes from `begin` to `end`. A token that begins before `start` belongs to an earlier text."""
        first = max(bisect_left(self._begins, start), bisect_right(self._ends, begin))
        return self._entries[first : bisect_left(self._begins, end)]


class OutputItems:
    """Takes the parts of one answer, in order, and returns the events of each.

    Items are appended, each with the next output index, and are done when `finish` returns. Text between items that is only white space
    is dropped. The items are the same for any chunking of the parts.
    """

    def __init__(self, events: Events, tools: Mapping[str, CalledTool]) -> None:
        self.logprobs = Logprobs()
        """Of all tokens so far, including those of the next part."""
        self._events = events
        self._tools = tools
        self._items: list[Item] = []
        self._broken: set[int] = set()
        self._text: _OpenText | None = None
        """The message or reasoning that is being written."""
        self._calls: dict[int, _OpenCall] = {}
        self._space = ""
        """White space that may be the start of a message."""

    @property
    def items(self) -> list[Item]:
        """The output, without calls that broke."""
        return [item for index, item in enumerate(self._items) if index not in self._broken]

    def add(self, part: Part) -> list[bytes]:
        if isinstance(part, str):
            return self._say(part)
        if isinstance(part, Reasoning):
            return self._think(part.text)
        if isinstance(part, CallBegin):
            return self._begin_call(part)
        if isinstance(part, CallArguments):
            return self._calls[part.index].add(part.text)
        if isinstance(part, CallEnd):
            call = self._calls.pop(part.index)
            self.logprobs.of_item(call.written)
            return call.close("completed")
        return self._break_call(part)

    def finish(self, status: str) -> list[bytes]:
        """Ends the answer. An open text gets this status, `completed` or `incomplete`. There is at least one item then."""
        events: list[bytes] = []
        if not self._items:
            space, self._space = self._space, ""
            events += self._open_text("message", role="assistant")
            assert self._text is not None
            events += self._text.add(space) if space else []
        events += self._close_text(status)
        for call in self._calls.values():
            events += call.close("incomplete")
        self._calls.clear()
        return events

    def _say(self, text: str) -> list[bytes]:
        events: list[bytes] = []
        if self._text is None or not self._text.is_message:
            text, self._space = self._space + text, ""
            if text.isspace():
                self._space = text
                return events
            events += self._open_text("message", role="assistant")
        assert self._text is not None
        return events + self._text.add(text)

    def _think(self, text: str) -> list[bytes]:
        events: list[bytes] = []
        if self._text is None or self._text.is_message:
            events = self._open_text("reasoning", summary=[])
        assert self._text is not None
        return events + self._text.add(text)

    def _open_text(self, kind: str, **fields: Any) -> list[bytes]:
        events = self._close_text("completed")
        item: Item = {"id": new_id(kind), "type": kind, **fields, "content": [], "status": "in_progress"}
        self._text = _OpenText(self._events, self._added(item), item, self.logprobs)
        return events + self._text.open()

    def _begin_call(self, begin: CallBegin) -> list[bytes]:
        space = self._space
        events = self._close_text("completed")
        tool = self._tools.get(begin.name) or CalledTool(begin.name)
        kind, member = ("custom_tool_call", "input") if tool.is_custom else ("function_call", "arguments")
        call_id = begin.id or f"call_{secrets.token_hex(12)}"
        item: Item = {"id": new_id(kind), "type": kind, "call_id": call_id, "name": tool.name, member: "", "status": "in_progress"}
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        call = self._calls[begin.index] = _OpenCall(self._events, self._added(item), item, space)
        return [*events, *call.open()]

    def _break_call(self, broken: CallBroken) -> list[bytes]:
        call = self._calls.pop(broken.index)
        self._broken.add(call.index)
        return [call.done("incomplete"), *self._say(call.space + broken.text)]

    def _close_text(self, status: str) -> list[bytes]:
        text, self._text, self._space = self._text, None, ""
        return [] if text is None else text.close(status)

    def _added(self, item: Item) -> int:
        self._items.append(item)
        return len(self._items) - 1


class _OpenItem:
    """An item that is being written. `place` says in its events where it is."""

    def __init__(self, events: Events, index: int, item: Item, event_name: str, **place: int) -> None:
        self.index = index
        self._events = events
        self._item = item
        self._pieces: list[str] = []
        self._event_name = f"response.{event_name}"
        self._place = {"item_id": item["id"], "output_index": index, **place}
        self._opening = delta_opening(f"{self._event_name}.delta", self._place)

    @property
    def written(self) -> str:
        """The text or arguments so far, as the model wrote them."""
        return "".join(self._pieces)

    def open(self) -> list[bytes]:
        return [self._events.event("response.output_item.added", {"output_index": self.index, "item": self._item})]

    def add(self, text: str) -> list[bytes]:
        self._pieces.append(text)
        return [self._events.delta(self._opening, text, b"")]

    def done(self, status: str) -> bytes:
        self._item["status"] = status
        return self._events.event("response.output_item.done", {"output_index": self.index, "item": self._item})

    def _event(self, kind: str, **fields: Any) -> bytes:
        return self._events.event(kind, {**self._place, **fields})


class _OpenText(_OpenItem):
    """A message or reasoning: an item with one part of text. Only messages have logprobs."""

    def __init__(self, events: Events, index: int, item: Item, logprobs: Logprobs) -> None:
        self.is_message = item["type"] == "message"
        super().__init__(events, index, item, "output_text" if self.is_message else "reasoning_text", content_index=0)
        self._logprobs = logprobs

    def open(self) -> list[bytes]:
        return [*super().open(), self._event("response.content_part.added", part=self._part("", []))]

    def add(self, text: str) -> list[bytes]:
        if not self.is_message:
            return super().add(text)
        self._pieces.append(text)
        return [self._events.delta(self._opening, text, b',"logprobs":' + msgspec.json.encode(self._logprobs.of_delta(text)))]

    def close(self, status: str) -> list[bytes]:
        text = self.written
        logprobs = self._logprobs.of_item(text)
        part = self._part(text, logprobs)
        more = {"logprobs": logprobs} if self.is_message else {}
        events = [
            self._event(f"{self._event_name}.done", text=text, **more),
            self._event("response.content_part.done", part=part),
        ]
        self._item["content"] = [part]
        return [*events, self.done(status)]

    def _part(self, text: str, logprobs: Sequence[msgspec.Raw]) -> dict[str, Any]:
        if not self.is_message:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class _OpenCall(_OpenItem):
    """A call whose arguments are being written. `space` is the white space before it: it is dropped, unless the call breaks.

    For a custom tool the model writes an object with one string. The client gets the string in one piece, when it is complete.
    """

    def __init__(self, events: Events, index: int, item: Item, space: str) -> None:
        self._is_custom = item["type"] == "custom_tool_call"
        super().__init__(events, index, item, "custom_tool_call_input" if self._is_custom else "function_call_arguments")
        self.space = space

    def add(self, text: str) -> list[bytes]:
        if not self._is_custom:
            return super().add(text)
        self._pieces.append(text)
        return []

    def close(self, status: str) -> list[bytes]:
        if not self._is_custom:
            self._item["arguments"] = arguments = self.written
            return [self._event(f"{self._event_name}.done", arguments=arguments, name=self._item["name"]), self.done(status)]
        self._item["input"] = value = _custom_input(self.written)
        delta = self._events.delta(self._opening, value, b"")
        return [delta, self._event(f"{self._event_name}.done", input=value), self.done(status)]


def _custom_input(arguments: str) -> str:
    """The string in the arguments; the arguments themselves if they have none."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = value.get(CUSTOM_ARGUMENT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
