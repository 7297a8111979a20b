"""In which formats a model writes calls of tools and its reasoning: as the flags say, or its chat template."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.text.formats.make import check_formats, detect
from penstock.text.formats.tables import REASONING_FORMATS, TOOL_FORMATS
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.errors import ConfigError

AUTO = "auto"
NONE = "none"

# As `penstock.text.tool_prompt` asks a model to write them, whose template says nothing of tools.
UNTAUGHT = "hermes"


@dataclass(frozen=True)
class ParserSettings:
    """The name of a format, `auto` or `none`, for each of the two."""

    tool: str = AUTO
    reasoning: str = AUTO

    def resolve(self, tokenizer: Tokenizer) -> tuple[str | None, str | None]:
        """The formats for this model. Raises ConfigError for two that cannot be read together."""
        tool, reasoning = _detected(tokenizer)
        chosen = (tool if self.tool == AUTO else _named(self.tool), reasoning if self.reasoning == AUTO else _named(self.reasoning))
        check_formats(*chosen)
        return chosen


def check_parsers(tool: str, reasoning: str) -> ParserSettings:
    """Raises ConfigError for a name that is none, and for two that cannot be read together."""
    for flag, name, known in (("--tool-parser", tool, TOOL_FORMATS), ("--reasoning-parser", reasoning, REASONING_FORMATS)):
        if name not in (AUTO, NONE, *known):
            raise ConfigError(f"{flag} is {name!r}: expected one of {', '.join((AUTO, NONE, *known))}")
    check_formats(_named(tool), _named(reasoning))
    return ParserSettings(tool, reasoning)


def _named(flag: str) -> str | None:
    return None if flag in (AUTO, NONE) else flag


def _detected(tokenizer: Tokenizer) -> tuple[str | None, str | None]:
    if tokenizer.chat_template is None:
        return None, None
    tool, reasoning = detect(tokenizer.chat_template)
    return (tool if tokenizer.renders_tools else UNTAUGHT), reasoning
