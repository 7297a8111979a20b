"""What the front end asks of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NotRequired, Protocol, TypedDict

from penstock.text.detokenizer import Detokenizer

DEFAULT_TEMPLATE = "default"
"""The name of the chat template that a prompt gets when it names none."""


class ToolFunction(TypedDict):
    """The function that a call names. Its arguments are what their JSON says, or the JSON itself where it is no object."""

    name: str
    arguments: dict[str, Any] | str


class ToolCall(TypedDict):
    """A call that the assistant made, as chat templates expect it."""

    id: str
    type: Literal["function"]
    function: ToolFunction


class ChatMessage(TypedDict):
    """A message of a chat, with its content as plain text. Only an assistant's has reasoning and calls, only a tool's a call's id."""

    role: str
    content: str
    name: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """All that a chat template is rendered with.

    `tools` are OpenAI's: `{"type": "function", "function": {"name", "description", "parameters"}}`. `template` names one of several that a
    model has. `continues` goes on with the last message instead of beginning another. `arguments` are the template's own, such as
    `enable_thinking`.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    begins_answer: bool = True
    continues: bool = False


class Answer(NamedTuple):
    """What a model generated: the text as a chat template would have to write it, and its tokens without the one that ended it."""

    text: str
    token_ids: Sequence[int]


class Tokenizer(Protocol):
    """One model's way between text and tokens."""

    vocab_size: int
    """Ids run from 0 to below this."""

    ordinary_ids: Sequence[int]
    """Those that are text: neither special nor holes in the vocabulary. (Of the built-in tokenizer, the words.)"""

    end_id: int
    """The one with which a model ends its text."""

    max_token_bytes: int
    """The UTF-8 length of its longest token: a text of more than n times that has more than n tokens."""

    definition: str | None
    """The text of its `tokenizer.json`, which a grammar is compiled for; None where there is no such thing."""

    chat_template: str | None
    """The source of the template that a chat with tools gets; None where there is none."""

    renders_tools: bool
    """Whether that template writes tools by itself. Where it does not, they are described in the format `hermes`."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with whatever the model expects at its beginning."""

    def encode_steps(self, text: str) -> Iterator[Sequence[int]]:
        """What `encode` returns, piece by piece: of a long text each takes some milliseconds only, if the tokenizer can do that."""

    def encode_infill(self, prefix: str, suffix: str) -> list[int] | None:
        """The tokens of a prompt to write what stands between the two; None where the vocabulary has no tokens for that."""

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """The tokens of a chat: those of the parts of its rendered text, one after the other."""

    def render_chat(self, prompt: ChatPrompt) -> str:
        """The text of a chat, special tokens included. Raises RequestError where it is none that the model's template takes.

        May be called from any thread.
        """

    def parts(self, rendered: str) -> list[str]:
        """A rendered text, cut wherever a part can be tokenized without the others. Joined they are the text; there is at least one."""

    def begins_part(self, rendered: str, position: int) -> bool:
        """Whether `parts` of any text that goes on like this from here would cut here, whatever stands before."""

    def encode_part(self, part: str) -> list[int]:
        """The tokens of one of the parts. May be called from any thread."""

    def encode_part_steps(self, part: str) -> Iterator[Sequence[int]]:
        """What `encode_part` returns, piece by piece, as `encode_steps` does."""

    def read_answer(self, before: str, token_ids: Sequence[int]) -> Answer | None:
        """What was generated after the part `before`, the last of a chat.

        `before` and the answer's text are one part then, and its tokens, together with those of `before`, decode to what the tokens
        of that part decode to. None where this is not certain: special tokens within, characters that are incomplete.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text of these tokens, special ones left out."""

    def token_bytes(self, token_id: int) -> bytes:
        """What this token adds to the text, which need not be whole characters."""

    def detokenizer(self, visible: frozenset[str] = frozenset(), skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one generation.

        Special tokens are left out, but for those whose text is in `visible`. With `skip_special_tokens=False` all of them are shown,
        the one that ended the generation included, if it is fed.
        """
