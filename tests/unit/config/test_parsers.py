"""Which formats a model writes is told by the flags, or by its chat template."""

from __future__ import annotations

import pytest

from penstock.cli.flags import make_parser
from penstock.cli.settings import serve_settings, worker_settings
from penstock.text.formats.chosen import ParserSettings
from penstock.text.tokenizers.model_tokenizer import ModelTokenizer
from penstock.wire.errors import ConfigError
from tokenizer_kinds import byte_level, tokenizer_of

WITH_TOOLS = "{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>{{ messages[0].content }}{{ '<think>' }}"
WITHOUT_TOOLS = "{{ messages[0].content }}"


def model(template: str | None) -> ModelTokenizer:
    return ModelTokenizer(byte_level(["</s>"]), {"eos_token": "</s>"}, template)


def test_auto_asks_the_template() -> None:
    assert ParserSettings().resolve(model(WITH_TOOLS)) == ("hermes", "think")
    assert ParserSettings().resolve(model(WITHOUT_TOOLS)) == ("hermes", None)
    assert ParserSettings().resolve(tokenizer_of("smollm")) == ("hermes", None)
    assert ParserSettings().resolve(model(None)) == (None, None)
    assert ParserSettings().resolve(tokenizer_of("WordTokenizer")) == (None, None)


def test_flags_come_first() -> None:
    assert ParserSettings("none", "none").resolve(model(WITH_TOOLS)) == (None, None)
    assert ParserSettings("mistral", "granite").resolve(model(WITH_TOOLS)) == ("mistral", "granite")
    assert ParserSettings("auto", "none").resolve(model(WITH_TOOLS)) == ("hermes", None)
    with pytest.raises(ConfigError, match="harmony"):
        ParserSettings("harmony", "auto").resolve(model(WITH_TOOLS))


def test_the_command_line() -> None:
    parser = make_parser()
    settings = worker_settings(parser.parse_args(["worker", "--listen=unix:/x", "--tool-parser=hermes", "--reasoning-parser=none"]))
    assert settings.parsers == ParserSettings("hermes", "none")
    served = serve_settings(parser.parse_args(["serve", "--tool-parser=mistral"]))
    assert {"--tool-parser=mistral", "--reasoning-parser=auto"} <= set(served.worker_arguments)


@pytest.mark.parametrize("flag", ["--tool-parser", "--reasoning-parser"])
def test_a_name_that_is_none_is_told_once(flag: str) -> None:
    parser = make_parser()
    for command, settings in ((["serve"], serve_settings), (["worker", "--listen=unix:/x"], worker_settings)):
        with pytest.raises(ConfigError, match=rf"{flag} is 'nope': expected one of auto, none, .*harmony"):
            settings(parser.parse_args([*command, f"{flag}=nope"]))
