"""The items of a request, read one by one. They are stored and shown in one form, and become messages of a chat."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from penstock.api.openai.chat import tool_call
from penstock.api.openai.schema import MEDIA, ImageUrl, Marked, PromptCacheBreakpoint, placeholder, unreadable
from penstock.api.pipeline.request import explain_wrong
from penstock.api.responses.schema import HOSTED_TOOLS, ITEM_CHOICES, ITEMS, AnswerItem, ImagePart
from penstock.media.picture import ImageRef
from penstock.text.formats.calls import MAX_NAME_CHARACTERS
from penstock.text.images import image_mark
from penstock.text.tokenizers.tokenizer import ChatMessage
from penstock.wire.errors import RequestError

Item = dict[str, Any]
"""An item as the API shows it. It always has a `type` and an `id`."""

MAX_DEPTH = 64
"""Levels of JSON in an item or a tool."""

CUSTOM_ARGUMENT = "input"
"""To the model, a custom tool is a function with this one argument."""

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_OUTPUTS = {"function_call_output": "function_call", "custom_tool_call_output": "custom_tool_call"}
_PARTS = {"message": "content", **dict.fromkeys(_OUTPUTS, "output")}
"""Where an item of this type has parts that can be marked for the cache."""

MARK = "prompt_cache_breakpoint"
IMAGE = "input_image"
FILE = "penstock_file"
"""Of a stored image that was fetched: its file in base64. Clients do not see it."""

StructType = TypeVar("StructType", bound=Struct)

ToolNames = Mapping[tuple[str | None, str], str]
"""The name by which the model knows each tool, by the tool's namespace, if it has one, and name."""


def known_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a tool, unless another has it. It depends on nothing else, so that turns share a prefix."""
    if namespace is None:
        return name
    joined = f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"
    if len(joined) <= MAX_NAME_CHARACTERS:
        return joined
    mark = hashlib.sha256(joined.encode()).hexdigest()[:16]
    return f"{joined[: MAX_NAME_CHARACTERS - len(mark) - 1]}_{mark}"


def new_id(kind: str) -> str:
    """An id for an item of this type."""
    return f"{_PREFIXES[kind]}_{secrets.token_hex(20)}"


def read_items(field: str, given: str | Sequence[dict[str, Any]], is_history: bool = False) -> list[Item]:
    """The items of a request's `field`. Raises RequestError that names the item and what is wrong with it.

    References stay as they are: `{"type": "item_reference", "id": …}`. With `is_history`, only the last item is new. See `_without_media`.
    """
    if isinstance(given, str):
        return [_message("user", [{"type": "input_text", "text": given}])]
    new = len(given) - 1 if is_history else 0
    return [_read_item(f"{field}[{index}]", item, is_new=index >= new) for index, item in enumerate(given)]


def read_struct(field: str, value: dict[str, Any], kind: type[StructType]) -> StructType:
    """Converts the value. Raises RequestError that names the field of the request."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as wrong:
        error = explain_wrong(msgspec.json.encode(value), wrong, ITEM_CHOICES)
        param = field if error.param is None else f"{field}.{error.param}"
        message = error.message.replace(f"`{error.param}`", f"`{param}`", 1)
        raise RequestError(message, param=param, code=error.code) from wrong


def check_depth(field: str, value: object) -> None:
    """Raises RequestError for a value that is nested too deeply to be encoded again."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise RequestError(f"`{field}` is nested more than {MAX_DEPTH} levels deep", param=field, code="too_deep")


def check_outputs(items: Iterable[Item], fields: Iterable[str]) -> None:
    """Raises RequestError for an output without its call: a model cannot make sense of it."""
    calls: set[tuple[str, str]] = set()
    for item, field in zip(items, fields, strict=True):
        kind = item["type"]
        if kind in _OUTPUTS and (_OUTPUTS[kind], item["call_id"]) not in calls:
            message = f"`{field}.call_id` is {item['call_id']!r}: no {_OUTPUTS[kind]} before it has that call_id"
            raise RequestError(message, param=f"{field}.call_id")
        if kind in _OUTPUTS.values():
            calls.add((kind, item["call_id"]))


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _kind(item: dict[str, Any]) -> Any:
    return item.get("type") or ("message" if "role" in item or "id" not in item else "item_reference")


def _read_item(field: str, value: dict[str, Any], is_new: bool) -> Item:
    kind = _kind(value)
    if not isinstance(kind, str) or kind not in ITEMS:
        shown = msgspec.json.encode(kind)[:80].decode(errors="replace") if isinstance(kind, str) else "not a string"
        hosted = isinstance(kind, str) and kind.partition("_call")[0] in HOSTED_TOOLS
        why = "this server has no such tool; leave the item out" if hosted else f"expected one of {', '.join(ITEMS)}"
        raise RequestError(f"`{field}.type` is {shown}: {why}", param=f"{field}.type")
    check_depth(field, value)
    # Stored items have one form, with defaults filled in.
    shape = AnswerItem if kind == "message" and value.get("role") == "assistant" else ITEMS[kind]
    value, images = _without_images(field, kind, _without_media(field, kind, value, is_new))
    read = read_struct(field, value, shape)
    fields = {name: member for name, member in cast(Item, msgspec.to_builtins(read)).items() if member is not None}
    if kind == "item_reference":
        return {"type": kind, "id": fields["id"]}
    item: Item = {"id": new_id(kind), "type": kind, **fields}
    if kind == "message":
        item |= _message(item["role"], item["content"], item["id"], item.get("status", "completed"))
    for index, image in images.items():
        item[_PARTS[kind]][index] = image
    if kind == "message":
        return item
    if kind == "reasoning":
        item.setdefault("summary", [])
    return {**item, "status": item.get("status", "completed")}


def _without_media(field: str, kind: str, value: dict[str, Any], is_new: bool) -> dict[str, Any]:
    """The item with placeholders for the parts that are neither text nor images. Raises RequestError for such a part of a new message.

    Codex keeps a message that was refused, and sends it again before the next one: refused once more, the thread would be lost.
    """
    name = _PARTS.get(kind)
    parts = None if name is None else value.get(name)
    if name is None or not isinstance(parts, list):
        return value
    read = []
    for index, part in enumerate(parts):
        media = part.get("type") if isinstance(part, dict) else None
        if isinstance(media, str) and media in MEDIA:
            if kind == "message" and is_new:
                raise unreadable(f"{field}.{name}[{index}]", media)
            marks = {MARK: part[MARK]} if MARK in part else {}
            part = {"type": "input_text", "text": placeholder(MEDIA[media]), **marks}
        read.append(part)
    return {**value, name: read}


def _without_images(field: str, kind: str, value: dict[str, Any]) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """The item with an empty text in place of each image; and the images as they are stored, by the index of the part."""
    name = _PARTS.get(kind)
    parts = None if name is None else value.get(name)
    if name is None or not isinstance(parts, list):
        return value, {}
    images = {
        index: _image(f"{field}.{name}[{index}]", part)
        for index, part in enumerate(parts)
        if isinstance(part, dict) and part.get("type") == IMAGE
    }
    if images and value.get("role") == "assistant":
        field = f"{field}.{name}[{min(images)}].type"
        raise RequestError(f"`{field}` is {IMAGE}: a message of the assistant has no images", param=field)
    empty = {"type": "input_text", "text": ""}
    return {**value, name: [empty if index in images else part for index, part in enumerate(parts)]}, images


def _image(field: str, part: dict[str, Any]) -> dict[str, Any]:
    """The part as it is stored and shown: as OpenAI's clients expect it. Raises RequestError without the image itself."""
    read = read_struct(field, part, ImagePart)
    if read.file_id is not None:
        field = f"{field}.file_id"
        message = f"`{field}` is not supported: this server stores no files; send the image as `image_url`"
        raise RequestError(message, param=field, code="unsupported_field")
    if read.image_url is None:
        field = f"{field}.image_url"
        raise RequestError(f"`{field}` is required", param=field, code="missing_field")
    url = read.image_url if isinstance(read.image_url, ImageUrl) else ImageUrl(read.image_url)
    shown = {"type": IMAGE, "image_url": url.url, "detail": read.detail or url.detail or "auto"}
    return shown if read.prompt_cache_breakpoint is None else {**shown, MARK: msgspec.to_builtins(read.prompt_cache_breakpoint)}


def _message(role: str, content: str | list[dict[str, Any]], item_id: str | None = None, status: str = "completed") -> Item:
    spoken = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": spoken, "text": content}] if isinstance(content, str) else content
    return {
        "id": item_id or new_id("message"),
        "type": "message",
        "role": role,
        "status": status,
        "content": [_part(part, spoken) for part in parts],
    }


def _part(part: dict[str, Any], spoken: str) -> dict[str, Any]:
    shown = {name: value for name, value in part.items() if value is not None}
    if shown["type"] == "refusal":
        return {"type": "refusal", "refusal": shown.get("refusal", shown.get("text", ""))}
    shown["type"] = spoken
    if spoken == "output_text":
        shown.setdefault("annotations", [])
    return shown


def images_of(items: Iterable[Item]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts of these items that are images, each with its place, such as `[0].content[1]`."""
    for number, item in enumerate(items):
        name = _PARTS.get(item["type"], "")
        parts = item.get(name)
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            if part["type"] == IMAGE:
                yield f"[{number}].{name}[{index}]", part


def without_files(items: Iterable[Item]) -> list[Item]:
    """The items as clients see them."""
    return [_without_files(item) if any(FILE in part for _, part in images_of([item])) else item for item in items]


def _without_files(item: Item) -> Item:
    name = _PARTS[item["type"]]
    return {**item, name: [{key: value for key, value in part.items() if key != FILE} for part in item[name]]}


class Messages:
    """Items as the messages of a chat, which templates need; and for each message the field of the request that it comes from.

    Reasoning, text and calls of the assistant that follow each other are one message.
    """

    def __init__(self, instructions: str | None = None, names: ToolNames | None = None) -> None:
        self._names = {} if names is None else names
        self.messages: list[ChatMessage] = []
        self.fields: list[str] = []
        self.marked: list[Marked] = []
        """The marks for the cache."""
        self.images: list[ImageRef] = []
        """Those whose marks are in the messages."""
        self._answer: ChatMessage | None = None
        """The assistant's message, while the next item may belong to it."""
        if instructions is not None:
            self._append("instructions", ChatMessage(role="system", content=instructions))

    def add(self, items: Sequence[Item], fields: Sequence[str]) -> None:
        """The last item is new: a model that cannot read its images refuses it, not those before."""
        for index, (item, field) in enumerate(zip(items, fields, strict=True)):
            self._add(item, field, index == len(items) - 1)

    def _add(self, item: Item, field: str, is_new: bool) -> None:
        kind = item["type"]
        if kind == "reasoning":
            self._think(_joined(item.get("content") or ()), field)
        elif kind == "message":
            parts = self._without_images(item["content"], f"{field}.content", is_old=not is_new)
            self._say(item["role"], _joined(parts), field)
            self._mark(parts, "")
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, field)
        else:
            output = item["output"]
            parts = [] if isinstance(output, str) else self._without_images(output, f"{field}.output", is_old=True)
            # The parts of an output are texts of their own, such as the results of an MCP server.
            text = output if isinstance(output, str) else "\n".join(part["text"] for part in parts)
            self._append(field, ChatMessage(role="tool", content=text, tool_call_id=item["call_id"]))
            self._mark(parts, "\n")

    def _without_images(self, parts: Sequence[dict[str, Any]], field: str, is_old: bool) -> Sequence[dict[str, Any]]:
        """The parts with the mark of each image as its text."""
        if all(part["type"] != IMAGE for part in parts):
            return parts
        read = list(parts)
        for index, part in enumerate(parts):
            if part["type"] == IMAGE:
                read[index] = {**part, "text": image_mark(len(self.images))}
                file = {"data": part[FILE]} if FILE in part else {"url": part["image_url"]}
                self.images.append(ImageRef(f"{field}[{index}]", **file, detail=part["detail"], is_old=is_old))
        return read

    def _mark(self, parts: Sequence[dict[str, Any]], between: str) -> None:
        """Notes the marks on these parts, which are the last message's content."""
        characters = 0
        for part in parts:
            characters += len(_joined([part]))
            if mark := part.get(MARK):
                self.marked.append(Marked(len(self.messages) - 1, characters, None, msgspec.convert(mark, PromptCacheBreakpoint)))
            characters += len(between)

    def _think(self, text: str, field: str) -> None:
        # Reasoning that another server encrypted has no text.
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
        key = item.get("namespace") or None, item["name"]
        name = self._names.get(key) or known_name(*key)
        self._answer.setdefault("tool_calls", []).append(tool_call(item["call_id"], name, _arguments(item)))

    def _append(self, field: str, message: ChatMessage, open_to_more: bool = False) -> None:
        self.messages.append(message)
        self.fields.append(field)
        self._answer = message if open_to_more else None


def cuts(messages: Sequence[ChatMessage]) -> list[slice]:
    """What can be dropped from a chat that is too long: 1, 2, 3 … of its oldest messages, but not its instructions or the last message.

    A call and its output are not separated.
    """
    kept = next((place for place, message in enumerate(messages) if message["role"] not in ("system", "developer")), len(messages))
    return [slice(kept, index) for index in range(kept + 1, len(messages)) if messages[index]["role"] != "tool"]


def _arguments(item: Item) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return msgspec.json.encode({CUSTOM_ARGUMENT: item["input"]}).decode()


def _joined(parts: Iterable[dict[str, Any]]) -> str:
    return "".join(part.get("text") or part.get("refusal") or "" for part in parts)
