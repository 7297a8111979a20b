"""Which formats a model writes is told by the flags, or by its chat template."""

from __future__ import annotations

import pytest

from penstock.cli.main import load
from penstock.config.commands import REASONING_PARSERS, TOOL_PARSERS, ParserSettings, WorkerSettings
from penstock.text.formats.make import choose_formats
from penstock.text.formats.tables import REASONING_FORMATS, TOOL_FORMATS
from penstock.text.tokenizers.model_tokenizer import ModelTokenizer
from penstock.wire.errors import ConfigError
from tokenizer_kinds import byte_level, tokenizer_of

WITH_TOOLS = "{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>{{ messages[0].content }}{{ '<think>' }}"
WITHOUT_TOOLS = "{{ messages[0].content }}"


def model(template: str | None) -> ModelTokenizer:
    return ModelTokenizer(byte_level(["</s>"]), {"eos_token": "</s>"}, template)


def test_auto_asks_the_template() -> None:
    assert choose_formats(ParserSettings(), model(WITH_TOOLS)) == ("hermes", "think")
    assert choose_formats(ParserSettings(), model(WITHOUT_TOOLS)) == ("hermes", None)
    assert choose_formats(ParserSettings(), tokenizer_of("smollm")) == ("hermes", None)
    assert choose_formats(ParserSettings(), model(None)) == (None, None)
    assert choose_formats(ParserSettings(), tokenizer_of("WordTokenizer")) == (None, None)


def test_flags_come_first() -> None:
    assert choose_formats(ParserSettings("none", "none"), model(WITH_TOOLS)) == (None, None)
    assert choose_formats(ParserSettings("mistral", "granite"), model(WITH_TOOLS)) == ("mistral", "granite")
    assert choose_formats(ParserSettings("auto", "none"), model(WITH_TOOLS)) == ("hermes", None)
    with pytest.raises(ConfigError, match="harmony"):
        choose_formats(ParserSettings("harmony", "auto"), model(WITH_TOOLS))


def test_the_command_line() -> None:
    loaded = load(["worker", "--listen=unix:/x", "--tool-parser=hermes", "--reasoning-parser=none"], {})
    assert loaded.settings.parsers == ParserSettings("hermes", "none")
    assert "--tool-parser=mistral" in load(["serve", "--tool-parser=mistral"], {}).resolved.arguments_for(WorkerSettings)


@pytest.mark.parametrize("flag", ["--tool-parser", "--reasoning-parser"])
@pytest.mark.parametrize("command", [["serve"], ["worker", "--listen=unix:/x"]])
def test_an_unknown_format_is_refused(flag: str, command: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"{flag} is 'nope': expected one of auto, none, .*harmony"):
        load([*command, f"{flag}=nope"], {})


def test_the_settings_know_every_format() -> None:
    assert ("auto", "none", *TOOL_FORMATS) == TOOL_PARSERS
    assert ("auto", "none", *REASONING_FORMATS) == REASONING_PARSERS
