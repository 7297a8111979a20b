"""The formats, as tables: what a model's tool calls and reasoning look like."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.text.formats.calls import Calls
from penstock.text.formats.json_calls import JsonCalls, NamedCalls, NamedOrListed
from penstock.text.formats.pythonic_calls import GemmaCalls, PythonicCalls
from penstock.text.formats.source import Markers, Source, Steps
from penstock.text.formats.tagged_calls import NO_STRING, STRING, TaggedCalls

DEFAULT_TOOL_FORMAT = "hermes"
"""What `penstock.text.tool_prompt` asks for, if the chat template knows no tools."""

HARMONY = "harmony"
JSON = "json"


class Body(Protocol):
    """How the calls after an opening are written."""

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        """Reads all calls and what ends them. Malformed if they are not calls, or if something else follows."""


@dataclass(frozen=True)
class Opening:
    """A marker that starts calls. Its last `given_back` characters are also part of the first call.

    A bare opening is a single character. It starts calls only at the start of the answer, and only of known tools.
    """

    marker: str
    body: Body
    given_back: int = 0
    is_bare: bool = False


@dataclass(frozen=True)
class Written:
    """How calls are written under a grammar: each is an object, with text before, between and after them."""

    before: str
    between: str
    after: str
    arguments: str = "arguments"


@dataclass(frozen=True)
class ToolFormat:
    """How a model calls tools. `tokens` are its special tokens besides the openings. With `ends_reasoning`, a call ends open reasoning."""

    openings: tuple[Opening, ...]
    tokens: frozenset[str] = frozenset()
    ends_reasoning: bool = False
    written: Written | None = None


@dataclass(frozen=True)
class ReasoningFormat:
    """How a model marks its reasoning. With `is_implied`, an answer begins inside reasoning unless the prompt has closed it."""

    opens: Markers
    closes: Markers
    is_implied: bool = False
    tokens: frozenset[str] = frozenset()


_TOOL_CALL_END = Markers("</tool_call>")
_JSON_IN_TAG = JsonCalls(_TOOL_CALL_END)
_JSON_LIST = JsonCalls()
_LLAMA = JsonCalls(separator=";")
_PYTHONIC = PythonicCalls(Markers("<|python_end|>"))
_GEMMA = PythonicCalls(Markers("```"), needs_list=False)
_PHI = JsonCalls(Markers("<|/tool_call|>"))
_GRANITE = JsonCalls(Markers("</tool_call>", "<|/tool_call|>"))

_QWEN_CODER = TaggedCalls(
    opens=Markers("<function="),
    name_ends=Markers(">"),
    key_opens=Markers("<parameter="),
    key_ends=Markers(">"),
    value_closes=Markers("</parameter>"),
    closes=Markers("</function>"),
    section_closes=_TOOL_CALL_END,
    trims=True,
)
_MINIMAX = TaggedCalls(
    opens=Markers('<invoke name="'),
    name_ends=Markers('">'),
    key_opens=Markers('<parameter name="'),
    key_ends=Markers('">'),
    value_closes=Markers("</parameter>"),
    closes=Markers("</invoke>"),
    section_closes=Markers("</minimax:tool_call>"),
)
_DSML = TaggedCalls(
    opens=Markers('<｜DSML｜invoke name="'),
    name_ends=Markers('">'),
    key_opens=Markers('<｜DSML｜parameter name="'),
    key_ends=Markers('" string="true">', '" string="false">', '">'),
    kinds=(('" string="true">', STRING), ('" string="false">', NO_STRING)),
    value_closes=Markers("</｜DSML｜parameter>"),
    closes=Markers("</｜DSML｜invoke>"),
    section_closes=Markers("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
)
_GLM = TaggedCalls(
    name_ends=Markers("\n", "<arg_key>", "</tool_call>"),
    given_back=frozenset({"<arg_key>", "</tool_call>"}),
    key_opens=Markers("<arg_key>"),
    key_ends=Markers("</arg_key>"),
    value_opens=Markers("<arg_value>"),
    value_closes=Markers("</arg_value>"),
    closes=_TOOL_CALL_END,
)
_DEEPSEEK = NamedCalls(
    opens=Markers("<｜tool▁call▁begin｜>"),
    separates=Markers("<｜tool▁sep｜>"),
    header=re.compile(r"(?P<name>\S+)"),
    closes=Markers("<｜tool▁call▁end｜>"),
    section_closes=Markers("<｜tool▁calls▁end｜>"),
    kind="function",
)
_KIMI = NamedCalls(
    opens=Markers("<|tool_call_begin|>"),
    separates=Markers("<|tool_call_argument_begin|>"),
    header=re.compile(r"(?P<id>(?:functions\.)?(?P<name>\S+?)(?::\d+)?)"),
    closes=Markers("<|tool_call_end|>"),
    section_closes=Markers("<|tool_calls_section_end|>"),
)
_MISTRAL = NamedOrListed(
    NamedCalls(separates=Markers("[ARGS]", "{"), header=re.compile(r"(?P<name>[^\s\[]+)(?:\[CALL_ID\](?P<id>\S+))?")),
    _JSON_LIST,
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        (Opening("<tool_call>", _JSON_IN_TAG),),
        frozenset({"</tool_call>"}),
        written=Written("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    ),
    "qwen3_coder": ToolFormat(
        (Opening("<tool_call>", _QWEN_CODER), Opening("<function=", _QWEN_CODER, given_back=len("<function="))),
        frozenset({"</tool_call>"}),
    ),
    "llama3_json": ToolFormat(
        (Opening("<|python_tag|>", _LLAMA), Opening("{", _LLAMA, given_back=1, is_bare=True)),
        written=Written("", "; ", "", arguments="parameters"),
    ),
    "pythonic": ToolFormat(
        (
            Opening("<|python_start|>", _PYTHONIC),
            Opening("<|python_tag|>", _PYTHONIC),
            Opening("[", _PYTHONIC, given_back=1, is_bare=True),
        ),
        frozenset({"<|python_end|>"}),
    ),
    "mistral": ToolFormat((Opening("[TOOL_CALLS]", _MISTRAL),), frozenset({"[ARGS]", "[CALL_ID]"})),
    "deepseek_v3": ToolFormat(
        (Opening("<｜tool▁calls▁begin｜>", _DEEPSEEK),),
        frozenset({"<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"}),
    ),
    "deepseek_v32": ToolFormat(
        (Opening("<｜DSML｜function_calls>", _DSML), Opening("<｜DSML｜tool_calls>", _DSML)),
        frozenset({"｜DSML｜"}),
    ),
    "glm45": ToolFormat(
        (Opening("<tool_call>", _GLM),),
        frozenset({"</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"}),
    ),
    "kimi_k2": ToolFormat(
        (Opening("<|tool_calls_section_begin|>", _KIMI),),
        frozenset({"<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>"}),
        ends_reasoning=True,
    ),
    "minimax_m2": ToolFormat((Opening("<minimax:tool_call>", _MINIMAX),), frozenset({"</minimax:tool_call>"})),
    HARMONY: ToolFormat((), frozenset({"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"})),
    "gemma": ToolFormat(
        (
            Opening("```tool_code\n", _GEMMA),
            Opening("```tool_call\n", _GEMMA),
            Opening("<start_function_call>", GemmaCalls(Markers("<end_function_call>"))),
        ),
        frozenset({"<end_function_call>", "<escape>"}),
    ),
    "phi4": ToolFormat(
        (Opening("<|tool_call|>", _PHI), Opening("functools[", _PHI, given_back=1)),
        frozenset({"<|/tool_call|>"}),
        written=Written("functools[", ", ", "]"),
    ),
    "granite": ToolFormat(
        (Opening("<|tool_call|>", _GRANITE), Opening("<tool_call>", _GRANITE)),
        frozenset({"</tool_call>", "<|/tool_call|>"}),
    ),
    # For a required call, if the model's own format cannot be put into a grammar.
    JSON: ToolFormat((Opening("[", _JSON_LIST, given_back=1, is_bare=True),), written=Written("[", ", ", "]", arguments="parameters")),
}

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat(Markers("<think>"), Markers("</think>")),
    "think_implied": ReasoningFormat(Markers("<think>"), Markers("</think>"), is_implied=True),
    "mistral": ReasoningFormat(Markers("[THINK]"), Markers("[/THINK]")),
    "granite": ReasoningFormat(
        Markers("Here is my thought process:", "Here's my thought process:"), Markers("Here is my response:", "Here's my response:")
    ),
    HARMONY: ReasoningFormat(Markers("<|channel|>analysis<|message|>"), Markers("<|end|>"), tokens=TOOL_FORMATS[HARMONY].tokens),
}
