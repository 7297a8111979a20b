"""What must be known before an answer begins."""

from __future__ import annotations

import pytest

from answers.transcript import TOOLS
from penstock.text.formats.make import check_formats, detect, make_parser, opens_reasoning, visible_tokens
from penstock.text.formats.tables import REASONING_FORMATS, TOOL_FORMATS
from penstock.wire.errors import ConfigError


def test_nothing_to_parse() -> None:
    assert make_parser(None, None, TOOLS, False) is None
    assert make_parser("hermes", None, {}, False) is None
    assert make_parser("hermes", "think", {}, False) is not None
    assert make_parser("harmony", None, {}, False) is not None
    assert make_parser(None, "harmony", TOOLS, False) is not None


@pytest.mark.parametrize(
    ("name", "ending", "opens"),
    [
        ("think", "<|im_start|>assistant\n<think>\n", True),
        ("think", "<|im_start|>assistant\n<think>", True),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("think", "<|im_start|>assistant\n", False),
        ("think", "</think>", False),
        ("think", "", False),
        ("think_implied", "<|Assistant|>", True),
        ("think_implied", "<|Assistant|><think>\n", True),
        ("think_implied", "<|Assistant|></think>\n", False),
        ("mistral", "[/INST][THINK]", True),
        ("mistral", "[/INST]", False),
        ("granite", "<|end_of_role|>", False),
        ("harmony", "<|start|>assistant", False),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>", True),
    ],
)
def test_whether_a_prompt_opens_reasoning(name: str, ending: str, opens: bool) -> None:
    assert opens_reasoning(name, ending) is opens


def test_visible_tokens() -> None:
    assert visible_tokens(None, None) == frozenset()
    assert visible_tokens("hermes", "think") == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    assert visible_tokens("mistral", "mistral") == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"}
    assert {"<|channel|>", "<|message|>", "<|end|>", "<|call|>"} <= visible_tokens(None, "harmony")
    assert visible_tokens("json", None) == frozenset()
    assert "{" not in visible_tokens("llama3_json", None)
    assert "｜DSML｜" in visible_tokens("deepseek_v32", None)


TEMPLATES = [
    ("{% for m in messages %}{{ m.content }}{% endfor %}", None, None),
    ("{% if tools %}<tool_call>{{ x }}</tool_call>{% endif %}", "hermes", None),
    ("{% if tools %}<tool_call>{% endif %}<think>\n\n</think>", "hermes", "think"),
    ("never says t-o-o-l-s: <tool_call>", None, None),
    ("{% if tools %}<tool_call>\n<function=a>\n<parameter=b>{% endif %}", "qwen3_coder", None),
    ("{{ tools }}<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key><think>", "glm45", "think"),
    ("{{ tools }}<|python_tag|>", "llama3_json", None),
    ('{{ tools }}{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json", None),
    ("{{ tools }}<|python_start|>", "pythonic", None),
    ("{{ tools }}[func_name1(params_name1=params_value1)]", "pythonic", None),
    ("{{ tools }}[AVAILABLE_TOOLS][TOOL_CALLS][", "mistral", None),
    ("{{ tools }}[TOOL_CALLS]name[ARGS][THINK]", "mistral", "mistral"),
    ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜></think>", "deepseek_v3", "think"),
    ("{{ tools }}<｜DSML｜function_calls><think>", "deepseek_v32", "think"),
    ("{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", None),
    ("{{ tools }}<minimax:tool_call><invoke><parameter><think>", "minimax_m2", "think"),
    ("<|start|>assistant<|channel|>final<|message|>", "harmony", "harmony"),
    ("{{ tools }}<start_function_call>call:", "gemma", None),
    ("{{ tools }}```tool_code\n", "gemma", None),
    ("{{ tools }}<|tool|><|/tool|><|tool_call|><|/tool_call|>", "phi4", None),
    ("{{ tools }}<|tool_call|>", "granite", None),
    ("{{ tools }}<|tool_call|>Here is my thought process", "granite", "granite"),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_detection(template: str, tools: str | None, reasoning: str | None) -> None:
    assert detect(template) == (tools, reasoning)
    check_formats(tools, reasoning)


def test_each_format_can_be_detected() -> None:
    """Except for the two that are no model's own."""
    assert {tools for _, tools, _ in TEMPLATES} == {None, *TOOL_FORMATS} - {"json"}
    assert {reasoning for _, _, reasoning in TEMPLATES} == {None, *REASONING_FORMATS} - {"think_implied"}


def test_formats_that_cannot_be_combined_are_named() -> None:
    with pytest.raises(ConfigError, match="--tool-parser hermes cannot be combined with --reasoning-parser harmony"):
        check_formats("hermes", "harmony")
