"""The tool calls of one answer, as they are read: begun, filled and ended, or given back as text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.text.formats.source import Malformed, Source
from penstock.text.output import CallArguments, CallBegin, CallBroken, CallEnd, Part

MAX_NAME_CHARACTERS = 256
MAX_ID_CHARACTERS = 256

_NAME = re.compile(r"[^\s\x00-\x1f\x7f\ud800-\udfff\"'<>(){}\[\]|]+")


class Calls:
    """The calls of one answer. They are read one at a time; `open` begins one.

    In a format with markers, any valid name makes a call: the client that runs the tools decides about unknown ones. In a format without
    markers (`open(known_only=True)`), only the name of a known tool makes a call; everything else is text.
    """

    def __init__(self, source: Source, out: list[Part], tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._source = source
        self._out = out
        self._tools = tools
        self.count = 0
        self._has_begun = False
        self.known_only = False

    def open(self, prefix: str, known_only: bool = False) -> None:
        """A call follows. `prefix` was its start."""
        self._source.mark(prefix)
        self.known_only = known_only

    def begin(self, name: str, call_id: str | None = None) -> None:
        is_name = len(name) <= MAX_NAME_CHARACTERS and _NAME.fullmatch(name) is not None
        if self._has_begun or not is_name or (self.known_only and name not in self._tools):
            raise Malformed
        self._has_begun = True
        self._out.append(CallBegin(self.count, name, call_id))

    def schema(self, name: str) -> Mapping[str, Any]:
        """The schema of a tool's parameters; empty for an unknown tool."""
        return self._tools.get(name, {})

    def arguments(self, text: str) -> None:
        self._out.append(CallArguments(self.count, text))

    def end(self) -> None:
        self._out.append(CallEnd(self.count))
        self.count += 1
        self._has_begun = False
        self._source.mark()

    def separated(self) -> None:
        """Forgets what was read since the last call: it only separates calls."""
        self._source.mark()

    def close(self) -> None:
        """There are no more calls here. Forgets what was read since the last one."""
        self._source.recorded()

    def give_up(self) -> str:
        """What was being read is not a call: returns it, to be shown as text. A call that has begun is reported as broken instead.

        At the end of the text, what still waits is part of it.
        """
        if self._source.ended:
            self._source.at = len(self._source.text)
        text = self._source.recorded()
        if not self._has_begun:
            return text
        self._out.append(CallBroken(self.count, text))
        self.count += 1
        self._has_begun = False
        return ""
