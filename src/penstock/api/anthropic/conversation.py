"""Converts Anthropic's messages to those of a chat template.

Anthropic's content consists of blocks, tool results are in the user's messages, and instructions may come anywhere. Chat templates take
messages of plain text, tool results as separate messages, and instructions only at the start; many require that user and assistant
take turns. Text blocks become paragraphs. In answers they are joined without a break: that is what the model wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.api.anthropic.blocks import unsealed
from penstock.api.anthropic.schema import (
    AllTurns,
    ClearThinking,
    ContentBlock,
    ContentSource,
    DocumentBlock,
    ImageAddress,
    ImageBlock,
    ImageData,
    Message,
    NamedTool,
    PlainTextSource,
    Prompted,
    RedactedThinkingBlock,
    Role,
    TextBlock,
    ThinkingBlock,
    ThinkingTurns,
    ToolAdditionBlock,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from penstock.api.anthropic.tools import Tools
from penstock.api.openai.schema import CacheControl, Marked, placeholder
from penstock.api.pipeline.hints import without_billing_header
from penstock.media.picture import ImageRef
from penstock.text.images import image_mark
from penstock.text.rewrites import reminder
from penstock.text.tokenizers.tokenizer import ChatMessage, ToolCall
from penstock.wire.errors import RequestError

_BLOCKS_OF: dict[Role, tuple[type, ...]] = {
    "user": (TextBlock, ToolResultBlock, DocumentBlock, ImageBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock, ToolAdditionBlock, ToolRemovalBlock),
}


class Conversation:
    """The messages of a chat, and the field of the request that each comes from. Consecutive messages of one role become one."""

    def __init__(self, request: Prompted) -> None:
        self.messages: list[ChatMessage] = []
        self.fields: list[str] = []
        self.images: list[ImageRef] = []
        """Those whose marks are in the messages."""
        self.tools = Tools(request.tools or (), _added_later(request.messages))
        self._calls: dict[str, str] = {}
        """The tool of each call so far, by the id of the call."""
        self._said: list[list[str]] = []
        """The paragraphs of each message. Joined once at the end: there may be thousands."""
        self._thought: list[list[str]] = []
        self.marked: list[Marked] = []
        """The marks for the cache, in Anthropic's order: tools, instructions, messages."""
        self._noted: list[tuple[int, int, int | None, str, CacheControl]] = []
        """The marks in messages: the message, which of its paragraphs, how much of that, the field, the mark."""
        readers: dict[Role, Callable[[str, Sequence[ContentBlock]], None]] = {
            "user": self._read_user,
            "assistant": self._read_assistant,
            "system": self._read_system,
        }
        if instructions := _instructions(request.system):
            self._say("system", "system", instructions)
        self._mark_head(request)
        last_of_user = max((index for index, message in enumerate(request.messages) if message.role == "user"), default=-1)
        self._last_of_user = f"messages[{last_of_user}]"
        for index, message in enumerate(request.messages):
            if not _is_cleared(message, index < last_of_user):
                field = f"messages[{index}]"
                readers[message.role](field, _blocks(field, message))
        self._join()

    def _mark_head(self, request: Prompted) -> None:
        """Templates write tools behind the instructions. So what is marked on tools, and at the end of instructions, ends with both."""
        begun = len(self.messages)
        for index, tool in enumerate(request.tools or ()):
            if tool.cache_control is not None:
                self.marked.append(Marked(begun, 0, tool.cache_control, None, f"tools[{index}].cache_control"))
        blocks = request.system if isinstance(request.system, list) else []
        for index, block in enumerate(blocks):
            if block.cache_control is not None:
                is_end = bool(request.tools) and index == len(blocks) - 1
                place = (begun, 0) if is_end else (0, len(_instructions(blocks[: index + 1])))
                self.marked.append(Marked(*place, block.cache_control, None, f"system[{index}].cache_control"))

    def _note(self, field: str, block: ContentBlock | ToolReferenceBlock, characters: int | None) -> None:
        """Notes a mark behind the first characters of what was said last; None: behind the whole message, with its calls."""
        if block.cache_control is not None:
            self._noted.append((len(self.messages) - 1, len(self._said[-1]) - 1, characters, f"{field}.cache_control", block.cache_control))

    def clear_thinking(self, edits: Iterable[ClearThinking]) -> None:
        """Keeps thinking only in the assistant's last turns that have any. A turn ends at the user's next message, not at a result."""
        kept = min((_turns(edit) for edit in edits), default=None)
        turns = 0
        counted = False
        for message in reversed(self.messages):
            if message["role"] == "user":
                counted = False
            elif "reasoning_content" in message:
                turns += not counted
                counted = True
                if kept is not None and turns > kept:
                    del message["reasoning_content"]

    def _read_user(self, field: str, blocks: Sequence[ContentBlock]) -> None:
        spoken: list[str] = []
        ends: list[tuple[str, ContentBlock, int]] = []
        for index, block in enumerate(blocks):
            place = f"{field}.content[{index}]"
            if isinstance(block, ToolResultBlock):
                self._answer_call(place, block)
            else:
                spoken.append(self._shown(place, block, is_old=field != self._last_of_user))
                if block.cache_control is not None:
                    ends.append((place, block, len(_paragraphs(spoken))))
        # A message that has only tool results is not a message of the user.
        if spoken or not blocks:
            self._say("user", field, _paragraphs(spoken))
        for end in ends:
            self._note(*end)

    def _read_assistant(self, field: str, blocks: Sequence[ContentBlock]) -> None:
        text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
        thinking = [block.thinking or unsealed(block.signature) for block in blocks if isinstance(block, ThinkingBlock)]
        calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
        self._calls.update({call.id: call.name for call in calls})
        self._say("assistant", field, text)
        self._thought[-1] += thinking
        if calls:
            self.messages[-1].setdefault("tool_calls", []).extend(map(_call, calls))
        characters = 0
        for index, block in enumerate(blocks):
            characters += len(block.text) if isinstance(block, TextBlock) else 0
            self._note(f"{field}.content[{index}]", block, None if isinstance(block, ToolUseBlock) else characters)

    def _read_system(self, field: str, blocks: Sequence[ContentBlock]) -> None:
        text = _paragraphs(self._instruction(f"{field}.content[{index}]", block) for index, block in enumerate(blocks))
        if not text:
            return
        if not self.messages or self.messages[-1]["role"] == "system":
            self._say("system", field, text)
        else:
            # Few templates take instructions in the middle of a chat. After a tool result they are added to it: the user did not speak.
            self._say("tool" if self.messages[-1]["role"] == "tool" else "user", field, reminder(text))
        for index, block in enumerate(blocks):
            self._note(f"{field}.content[{index}]", block, len(self._said[-1][-1]))

    def _instruction(self, field: str, block: ContentBlock) -> str:
        match block:
            case ToolAdditionBlock(tool=tool):
                return self.tools.add(f"{field}.tool.definition", [tool])
            case ToolRemovalBlock(tool=tool):
                return self.tools.remove(tool.name)
        return _text(field, block)

    def _say(self, role: str, field: str, text: str) -> None:
        """Adds to the last message if it has this role; else adds a message."""
        if self.messages and self.messages[-1]["role"] == role:
            self._said[-1].append(text)
        else:
            self._append(field, ChatMessage(role=role, content=text))

    def _answer_call(self, field: str, block: ToolResultBlock) -> None:
        name = self._calls.get(block.tool_use_id)
        if name is None:
            field = f"{field}.tool_use_id"
            raise RequestError(f"`{field}` is {block.tool_use_id[:80]!r}: no tool_use before it has that id", param=field)
        content = self._result(field, block)
        self._append(field, ChatMessage(role="tool", content=content, name=name, tool_call_id=block.tool_use_id))
        for index, part in enumerate(block.content if isinstance(block.content, list) else ()):
            self._note(f"{field}.content[{index}]", part, len(content))
        self._note(field, block, len(content))

    def _result(self, field: str, block: ToolResultBlock) -> str:
        if isinstance(block.content, list):
            found = [NamedTool(part.tool_name) for part in block.content if isinstance(part, ToolReferenceBlock)]
            texts = [self._shown(f"{field}.content[{index}]", part, is_old=True) for index, part in enumerate(block.content)]
            text = _paragraphs([*texts, self.tools.add(field, found)])
        else:
            text = block.content or ""
        # Templates have no other place for errors.
        return f"Error: {text}" if block.is_error and not text.startswith("Error") else text

    def _shown(self, field: str, part: ContentBlock | ToolReferenceBlock, is_old: bool) -> str:
        """A block in a user's message or a result. Clients keep a message that was refused, and send it again before the next one. Refused
        once more, the session would end: what is old and cannot be read is left out."""
        match part:
            case ToolReferenceBlock():
                return ""
            case ImageBlock():
                self.images.append(_image(field, part, is_old))
                return image_mark(len(self.images) - 1)
            case DocumentBlock(source=source) if is_old and not isinstance(source, PlainTextSource | ContentSource):
                return placeholder("document")
        return _text(field, part)

    def _append(self, field: str, message: ChatMessage) -> None:
        self.messages.append(message)
        self.fields.append(field)
        self._said.append([message["content"]])
        self._thought.append([])

    def _join(self) -> None:
        for message, said, thought in zip(self.messages, self._said, self._thought, strict=True):
            message["content"] = _paragraphs(said)
            if reasoning := _paragraphs(thought):
                message["reasoning_content"] = reasoning
        for place, number, characters, field, control in self._noted:
            said = self._said[place]
            if characters is None:
                self.marked.append(Marked(place + 1, 0, control, None, field))
            else:
                length = len(_paragraphs([*said[:number], said[number][:characters]]))
                self.marked.append(Marked(place, length, control, None, field))


def _instructions(system: str | list[TextBlock] | None) -> str:
    texts = [system or ""] if not isinstance(system, list) else [block.text for block in system]
    return _paragraphs(map(without_billing_header, texts))


def _added_later(messages: Iterable[Message]) -> set[str]:
    """The tools that a message adds before any removes them: they are not there from the start."""
    first: dict[str, bool] = {}
    for message in messages:
        if message.role == "system" and isinstance(message.content, list):
            for block in message.content:
                if isinstance(block, ToolAdditionBlock | ToolRemovalBlock) and isinstance(block.tool, NamedTool):
                    first.setdefault(block.tool.name, isinstance(block, ToolAdditionBlock))
    return {name for name, is_added in first.items() if is_added}


def _is_cleared(message: Message, is_followed: bool) -> bool:
    """`is_followed`: a user message comes after it."""
    if message.clear_at is not None and message.role != "system":
        raise RequestError("`clear_at` is only allowed in a message of the role system", param="messages.clear_at")
    return message.clear_at == "next_user_message" and is_followed


def _blocks(field: str, message: Message) -> Sequence[ContentBlock]:
    if isinstance(message.content, str):
        return [TextBlock(text=message.content)]
    for index, block in enumerate(message.content):
        if not isinstance(block, _BLOCKS_OF[message.role]):
            field = f"{field}.content[{index}].type"
            kind = type(block).__struct_config__.tag
            raise RequestError(f"`{field}` is {kind}: a message of the role {message.role} has no such block", param=field)
    return message.content


def _image(field: str, block: ImageBlock, is_old: bool) -> ImageRef:
    source = block.source
    if isinstance(source, ImageData):
        return ImageRef(field, data=source.data, is_old=is_old)
    if isinstance(source, ImageAddress):
        return ImageRef(field, source.url, is_old=is_old)
    field = f"{field}.source.type"
    message = f"`{field}` is file: this server stores no files; send the image with a source of the type base64 or url"
    raise RequestError(message, param=field, code="unsupported_field")


def _text(field: str, block: ContentBlock) -> str:
    if isinstance(block, TextBlock):
        return block.text
    assert isinstance(block, DocumentBlock), "other blocks are refused, or read elsewhere"
    return _document(field, block)


def unreadable(field: str, kind: str, why: str, code: str = "unsupported_field") -> RequestError:
    """Claude Code looks for these words and for the place of the block. It puts a text in its place and goes on."""
    place = field.replace("[", ".").replace("]", "")
    return RequestError(f"{place}: Could not process {kind}: {why}", param=field, code=code)


def _document(field: str, block: DocumentBlock) -> str:
    if block.citations is not None and block.citations.enabled:
        field = f"{field}.citations"
        raise RequestError(f"`{field}` is not supported yet; leave it out", param=field, code="unsupported_field")
    source = block.source
    if isinstance(source, PlainTextSource):
        text = source.data
    elif isinstance(source, ContentSource):
        text = source.content if isinstance(source.content, str) else _paragraphs(part.text for part in source.content)
    else:
        raise unreadable(f"{field}.document", "PDF", "this model reads no documents but text")
    return _paragraphs([block.title or "", block.context or "", text])


def _call(block: ToolUseBlock) -> ToolCall:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _turns(edit: ClearThinking) -> float:
    if isinstance(edit.keep, ThinkingTurns):
        return edit.keep.value
    return float("inf") if edit.keep == "all" or isinstance(edit.keep, AllTurns) else 1


def _paragraphs(texts: Iterable[str]) -> str:
    return "\n\n".join(text for text in texts if text)
