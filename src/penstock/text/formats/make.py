"""What the rest of the program calls.

`make_parser` for one answer, `opens_reasoning` for its prompt, `visible_tokens` for the detokenizer, `choose_formats` when a model is
loaded. `grammar.py` has the grammars.
"""

from __future__ import annotations

from penstock.config.commands import AUTO, NONE, ParserSettings
from penstock.text.formats.harmony import HarmonyParser
from penstock.text.formats.parser import FormatParser, Schemas
from penstock.text.formats.tables import DEFAULT_TOOL_FORMAT, HARMONY, JSON, REASONING_FORMATS, TOOL_FORMATS
from penstock.text.output import OutputParser
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.errors import ConfigError


def make_parser(tool_format: str | None, reasoning_format: str | None, tools: Schemas, inside_reasoning: bool) -> OutputParser | None:
    """A fresh parser for one answer. None if there is nothing to look for.

    `tools` are the schemas of the tools' parameters by name. Without tools, the markers of calls are text; only Harmony's channels are
    always read. `inside_reasoning`: the prompt ends inside the model's reasoning.
    """
    if HARMONY in (tool_format, reasoning_format) and tool_format != JSON:
        return HarmonyParser(tools if tool_format == HARMONY else {}, inside_reasoning)
    tool = TOOL_FORMATS[tool_format] if tool_format is not None and tools else None
    reasoning = REASONING_FORMATS[reasoning_format] if reasoning_format not in (None, HARMONY) else None
    if tool is None and reasoning is None:
        return None
    return FormatParser(tool, reasoning, tools, inside_reasoning)


def opens_reasoning(reasoning_format: str, prompt_ending: str) -> bool:
    """Whether a prompt with this ending leaves the model inside its reasoning."""
    reasoning = REASONING_FORMATS[reasoning_format]
    ending = prompt_ending.rstrip()
    if reasoning.is_implied:
        return not ending.endswith(reasoning.closes.strings)
    return ending.endswith(reasoning.opens.strings)


def visible_tokens(tool_format: str | None, reasoning_format: str | None) -> frozenset[str]:
    """The strings that a detokenizer must show as text, even if they are special tokens."""
    visible: set[str] = set()
    if tool_format is not None:
        tools = TOOL_FORMATS[tool_format]
        visible |= tools.tokens | {opening.marker for opening in tools.openings if not opening.is_bare}
    if reasoning_format is not None:
        reasoning = REASONING_FORMATS[reasoning_format]
        visible |= reasoning.tokens | {*reasoning.opens.strings, *reasoning.closes.strings}
    return frozenset(visible)


def check_formats(tool_format: str | None, reasoning_format: str | None) -> None:
    """Raises ConfigError for two formats that cannot be combined. `auto` and `none` go with every format."""
    formats = {tool_format, reasoning_format} - {None, AUTO, NONE}
    if HARMONY in formats and len(formats) > 1:
        raise ConfigError(
            f"{HARMONY!r} is a format for both: --tool-parser {tool_format} cannot be combined with --reasoning-parser {reasoning_format}"
        )


# Tried in this order: formats of one model family before those of several. All strings of an entry must be in the template.
_TOOL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, ("<|channel|>", "<|start|>", "<|message|>")),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("minimax:tool_call",)),
    ("gemma", ("<start_function_call>",)),
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("phi4", ("<|/tool_call|>",)),
    ("phi4", ("functools[",)),
    ("granite", ("<|tool_call|>",)),
    ("hermes", ("<tool_call>",)),
    ("gemma", ("```tool_code",)),
    ("gemma", ("```tool_call",)),
    ("pythonic", ("<|python_start|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters": dictionary of argument name',)),
)
_REASONING_SIGNS: tuple[tuple[str, str], ...] = (
    (HARMONY, "<|channel|>"),
    ("mistral", "[THINK]"),
    ("think", "<think>"),
    ("think", "</think>"),
    ("granite", "Here is my thought process"),
)


def detect(template: str) -> tuple[str | None, str | None]:
    """The formats of tool calls and reasoning that a chat template uses, None if it uses none. Without `tools` in it there are no calls."""
    tool = next((name for name, signs in _TOOL_SIGNS if all(sign in template for sign in signs)), None)
    reasoning = next((name for name, sign in _REASONING_SIGNS if sign in template), None)
    return (tool if "tools" in template or tool == HARMONY else None), reasoning


def choose_formats(settings: ParserSettings, tokenizer: Tokenizer) -> tuple[str | None, str | None]:
    """The formats of this model's tool calls and reasoning. Raises ConfigError for two that cannot be combined."""
    tool, reasoning = None, None
    if tokenizer.chat_template is not None:
        tool, reasoning = detect(tokenizer.chat_template)
        tool = tool if tokenizer.renders_tools else DEFAULT_TOOL_FORMAT
    chosen = (
        tool if settings.tool == AUTO else _named(settings.tool),
        reasoning if settings.reasoning == AUTO else _named(settings.reasoning),
    )
    check_formats(*chosen)
    return chosen


def _named(name: str) -> str | None:
    return None if name in (AUTO, NONE) else name
