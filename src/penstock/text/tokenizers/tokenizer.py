"""What the front end needs from a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NotRequired, Protocol, TypedDict

from msgspec import Struct

from penstock.text.detokenizer import Detokenizer
from penstock.wire.images import ImageLayout

DEFAULT_TEMPLATE = "default"
"""The name of the chat template that a prompt gets when it names none."""


class ToolFunction(TypedDict):
    """The function that a call names. Its arguments are the decoded JSON object, or the text itself if it is not one."""

    name: str
    arguments: dict[str, Any] | str


class ToolCall(TypedDict):
    """A tool call of the assistant, as chat templates expect it."""

    id: str
    type: Literal["function"]
    function: ToolFunction


class ChatMessage(TypedDict):
    """A message of a chat, with its content as plain text. Only the assistant's has reasoning and calls, only a tool's has a call id."""

    role: str
    content: str
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]


class ChatPrompt(Struct, frozen=True):
    """Everything that a chat template gets.

    `tools` are OpenAI's: `{"type": "function", "function": {"name", "description", "parameters"}}`. `template` names one of the model's
    templates. `continues`: continue the last message instead of starting another. `arguments` are for the template itself, such as
    `enable_thinking`. `images` are those whose marks are in the contents (`text/images.py`), by name; `image_placeholder` is that of the
    model's ImageRules, also for a chat without images: no text becomes a placeholder.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = {}
    template: str | None = None
    begins_answer: bool = True
    continues: bool = False
    images: Mapping[bytes, ImageLayout] = {}
    image_placeholder: str = ""


class Answer(NamedTuple):
    """What a model generated: the text as a chat template must write it, and its tokens without the end token."""

    text: str
    token_ids: Sequence[int]


class Tokenizer(Protocol):
    """Converts between text and the tokens of one model."""

    vocab_size: int
    """Ids are below this."""

    ordinary_ids: Sequence[int]
    """The ids that are text: not special and not holes in the vocabulary. For the built-in tokenizer, the words."""

    end_id: int
    """The token that ends the model's text."""

    max_token_bytes: int
    """The UTF-8 length of the longest token. A text of more than n times this length has more than n tokens."""

    definition: str | None
    """The text of its `tokenizer.json`, for compiling grammars. None for the built-in tokenizer."""

    chat_template: str | None
    """The source of the template for a chat with tools. None if the model has none."""

    renders_tools: bool
    """Whether that template renders tools itself. Otherwise they are described in the format `hermes`."""

    template_losses: Sequence[str]
    """What the model's templates cannot render, for the log. Requests that need it are refused."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with the tokens that the model expects at its start."""

    def encode_steps(self, text: str) -> Iterator[Sequence[int]]:
        """What `encode` returns, piece by piece. Each piece of a long text takes a few milliseconds, if the tokenizer can be cut."""

    def encode_infill(self, prefix: str, suffix: str) -> list[int] | None:
        """The tokens of a prompt to write the text between the two. None if the vocabulary has no tokens for that."""

    def render_chat(self, prompt: ChatPrompt) -> str:
        """The text of a chat, special tokens included. Thread-safe.

        Raises RequestError if the model's template refuses the chat, MessageError for a message that it refuses or leaves out.
        """

    def parts(self, rendered: str) -> list[str]:
        """A rendered text, cut into parts that can be tokenized separately. Joined they are the text; there is at least one."""

    def begins_part(self, rendered: str, position: int) -> bool:
        """Whether `parts` cuts here, whatever stands before this position."""

    def encode_part(self, part: str) -> list[int]:
        """The tokens of one part. Thread-safe."""

    def encode_part_steps(self, part: str) -> Iterator[Sequence[int]]:
        """What `encode_part` returns, piece by piece, as `encode_steps` does."""

    def read_answer(self, before: str, token_ids: Sequence[int]) -> Answer | None:
        """The answer that was generated after `before`, the last part of a chat.

        `before` and the answer's text are one part, and the tokens of `before` and of the answer decode to that part's text. None if this
        is not certain: the answer contains special tokens or incomplete characters.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, without special ones."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to the text. They may be part of a character."""

    def detokenizer(self, visible: frozenset[str] = frozenset(), skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one generation.

        Special tokens are left out, except those whose text is in `visible`. With `skip_special_tokens=False` all are shown, also the end
        token if it is fed.
        """
