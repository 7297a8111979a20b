"""Calls on their way out: begun, filled, ended; or given back as text when they turn out to be none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.text.formats.source import Malformed, Source
from penstock.text.output import CallArguments, CallBegin, CallBroken, CallEnd, Part

LONGEST_NAME = 256
LONGEST_ID = 256

_NAME = re.compile(r"[^\s\x00-\x1f\x7f\ud800-\udfff\"'<>(){}\[\]|]+")


class Calls:
    """The calls of one answer. Exactly one is being read at a time, from `open` on.

    Where the notation has markers, any name that looks like one makes a call: whoever runs the tools knows best what to say about an
    unknown one. Where it has none (`open(known_only=True)`), only a name among the tools does; all else is text.
    """

    def __init__(self, source: Source, out: list[Part], tools: Mapping[str, Mapping[str, Any]]) -> None:
        self._source = source
        self._out = out
        self._tools = tools
        self.count = 0
        self._has_begun = False
        self.known_only = False

    def open(self, prefix: str, known_only: bool = False) -> None:
        """What comes is a call, and `prefix` was its beginning."""
        self._source.mark(prefix)
        self.known_only = known_only

    def begin(self, name: str, call_id: str | None = None) -> None:
        is_name = len(name) <= LONGEST_NAME and _NAME.fullmatch(name) is not None
        if self._has_begun or not is_name or (self.known_only and name not in self._tools):
            raise Malformed
        self._has_begun = True
        self._out.append(CallBegin(self.count, name, call_id))

    def schema(self, name: str) -> Mapping[str, Any]:
        """The schema of a tool's parameters; empty where nothing is known."""
        return self._tools.get(name, {})

    def arguments(self, text: str) -> None:
        self._out.append(CallArguments(self.count, text))

    def end(self) -> None:
        self._out.append(CallEnd(self.count))
        self.count += 1
        self._has_begun = False
        self._source.mark()

    def separated(self) -> None:
        """What was read since the last call is only what separates it from the next one."""
        self._source.mark()

    def close(self) -> None:
        """There are no more calls here, and what was read since the last is part of none."""
        self._source.recorded()

    def give_up(self) -> str:
        """What was being read is no call: what is to be shown of it as text. A call that has begun is broken.

        Where the text has ended, what was held back of it is part of that.
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
