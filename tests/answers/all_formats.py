"""Every transcript, by format."""

from __future__ import annotations

from dataclasses import replace

from answers import harmony_formats, json_formats, named_formats, pythonic_formats, reasoning_formats, tagged_formats
from answers.transcript import Transcript

BY_TOOL_FORMAT: dict[str, list[Transcript]] = {
    "hermes": json_formats.HERMES,
    "qwen3_coder": tagged_formats.QWEN3_CODER,
    "llama3_json": json_formats.LLAMA3_JSON,
    "pythonic": pythonic_formats.PYTHONIC,
    "mistral": named_formats.MISTRAL,
    "deepseek_v3": named_formats.DEEPSEEK_V3,
    "deepseek_v32": tagged_formats.DEEPSEEK_V32,
    "glm45": tagged_formats.GLM45,
    "kimi_k2": named_formats.KIMI_K2,
    "minimax_m2": tagged_formats.MINIMAX_M2,
    "harmony": harmony_formats.HARMONY,
    "gemma": pythonic_formats.GEMMA,
    "phi4": json_formats.PHI4,
    "granite": json_formats.GRANITE,
    "json": json_formats.JSON,
}

BY_REASONING_FORMAT: dict[str, list[Transcript]] = {
    "think": reasoning_formats.THINK,
    "think_implied": reasoning_formats.THINK_IMPLIED,
    "mistral": reasoning_formats.MISTRAL_THINK,
    "granite": reasoning_formats.GRANITE_THINK,
    "harmony": harmony_formats.HARMONY,
}


def all_transcripts() -> list[tuple[str, Transcript]]:
    """Each with its name, and with the formats that it is to be read with."""
    tools = [(f"{name}: {one.name}", replace(one, tools=name)) for name, some in BY_TOOL_FORMAT.items() for one in some]
    reasoning = [
        (f"reasoning {name}: {one.name}", replace(one, reasoning=name))
        for name, some in BY_REASONING_FORMAT.items()
        if name != "harmony"
        for one in some
    ]
    return tools + reasoning
