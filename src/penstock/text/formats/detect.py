"""Which formats a model has, by its chat template."""

from __future__ import annotations

from penstock.text.formats.tables import HARMONY

# In the order in which they are tried: what only one model family writes comes before what several do. All of the strings must be there.
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
    """The formats of calls and of reasoning. None for what the template does not show; without `tools` in it there are no calls."""
    tool = next((name for name, signs in _TOOL_SIGNS if all(sign in template for sign in signs)), None)
    reasoning = next((name for name, sign in _REASONING_SIGNS if sign in template), None)
    return (tool if "tools" in template or tool == HARMONY else None), reasoning
