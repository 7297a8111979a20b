"""From Anthropic's messages to those of a chat template.

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
    ImageBlock,
    Message,
    PlainTextSource,
    Prompted,
    RedactedThinkingBlock,
    Role,
    TextBlock,
    ThinkingBlock,
    ThinkingTurns,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from penstock.api.pipeline.hints import without_billing_header
from penstock.text.tokenizers.tokenizer import ChatMessage, ToolCall
from penstock.wire.errors import RequestError

_BLOCKS_OF: dict[Role, tuple[type, ...]] = {
    "user": (TextBlock, ToolResultBlock, DocumentBlock, ImageBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class Conversation:
    """The messages of a chat, and the field of the request that each comes from. Consecutive messages of one role become one."""

    def __init__(self, request: Prompted) -> None:
        self.messages: list[ChatMessage] = []
        self.fields: list[str] = []
        self._calls: dict[str, str] = {}
        """The tool of each call so far, by the id of the call."""
        self._said: list[list[str]] = []
        """The paragraphs of each message. Joined once at the end: there may be thousands."""
        self._thought: list[list[str]] = []
        readers: dict[Role, Callable[[str, Sequence[ContentBlock]], None]] = {
            "user": self._read_user,
            "assistant": self._read_assistant,
            "system": self._read_system,
        }
        if instructions := _instructions(request.system):
            self._say("system", "system", instructions)
        last_of_user = max((index for index, message in enumerate(request.messages) if message.role == "user"), default=-1)
        for index, message in enumerate(request.messages):
            if not _is_cleared(message, index < last_of_user):
                field = f"messages[{index}]"
                readers[message.role](field, _blocks(field, message))
        self._join()

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
        for index, block in enumerate(blocks):
            place = f"{field}.content[{index}]"
            if isinstance(block, ToolResultBlock):
                self._answer_call(place, block)
            else:
                spoken.append(_text(place, block))
        # A message that has only tool results is not a message of the user.
        if spoken or not blocks:
            self._say("user", field, _paragraphs(spoken))

    def _read_assistant(self, field: str, blocks: Sequence[ContentBlock]) -> None:
        text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
        thinking = [block.thinking or unsealed(block.signature) for block in blocks if isinstance(block, ThinkingBlock)]
        calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
        self._calls.update({call.id: call.name for call in calls})
        self._say("assistant", field, text)
        self._thought[-1] += thinking
        if calls:
            self.messages[-1].setdefault("tool_calls", []).extend(map(_call, calls))

    def _read_system(self, field: str, blocks: Sequence[ContentBlock]) -> None:
        text = _paragraphs(_text(field, block) for block in blocks)
        if not text:
            return
        if not self.messages or self.messages[-1]["role"] == "system":
            self._say("system", field, text)
        else:
            # Few templates take instructions in the middle of a chat. After a tool result they are added to it: the user did not speak.
            reminder = f"<system-reminder>\n{text}\n</system-reminder>"
            self._say("tool" if self.messages[-1]["role"] == "tool" else "user", field, reminder)

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
        self._append(field, ChatMessage(role="tool", content=_result(field, block), name=name, tool_call_id=block.tool_use_id))

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


def _instructions(system: str | list[TextBlock] | None) -> str:
    texts = [system or ""] if not isinstance(system, list) else [block.text for block in system]
    return _paragraphs(map(without_billing_header, texts))


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


def _result(field: str, block: ToolResultBlock) -> str:
    if isinstance(block.content, list):
        text = _paragraphs(_text(f"{field}.content[{index}]", part) for index, part in enumerate(block.content))
    else:
        text = block.content or ""
    # Templates have no other place for errors.
    return f"Error: {text}" if block.is_error and not text.startswith("Error") else text


def _text(field: str, block: ContentBlock | ToolReferenceBlock) -> str:
    match block:
        case TextBlock(text=text):
            return text
        case ToolReferenceBlock(tool_name=name):
            return f"The tool {name} can be called."
        case DocumentBlock():
            return _document(field, block)
    raise RequestError(f"`{field}` is an image: images are not supported yet", param=field, code="unsupported_field")


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
        field = f"{field}.source.type"
        kind = type(source).__struct_config__.tag
        message = f"`{field}` is {kind}: expected text or content; other documents are not supported yet"
        raise RequestError(message, param=field, code="unsupported_field")
    return _paragraphs([block.title or "", block.context or "", text])


def _call(block: ToolUseBlock) -> ToolCall:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _turns(edit: ClearThinking) -> float:
    if isinstance(edit.keep, ThinkingTurns):
        return edit.keep.value
    return float("inf") if edit.keep == "all" or isinstance(edit.keep, AllTurns) else 1


def _paragraphs(texts: Iterable[str]) -> str:
    return "\n\n".join(text for text in texts if text)
