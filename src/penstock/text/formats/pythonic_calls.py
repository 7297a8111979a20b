"""Calls as a programmer would write them: `[f(a=1, b="x"), g()]`, and those of FunctionGemma: `call:f{a:1}`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.text.formats.calls import LONGEST_NAME, Calls
from penstock.text.formats.json_calls import close
from penstock.text.formats.literals import LONGEST_KEY, Notation
from penstock.text.formats.schema_types import quoted
from penstock.text.formats.source import NO_MARKERS, Malformed, Markers, Source, Steps

_PYTHON = Notation()
_GEMMA = Notation(Markers("<escape>"), has_bare_keys=True)
_NAME = re.compile(r"[-.\w]*")
_KEYWORD = re.compile(r"\w*")
_CALL = Markers("call:")
_BRACE = Markers("{")


@dataclass(frozen=True)
class PythonicCalls:
    """Calls with keyword arguments, in a list; or, where `needs_list` is not set, one after the other, too."""

    closes: Markers = NO_MARKERS
    needs_list: bool = True

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from source.spaces()
        is_list = (yield from source.peek()) == "["
        if is_list:
            source.at += 1
        elif self.needs_list:
            raise Malformed
        while True:
            yield from source.spaces()
            yield from self._call(source, calls)
            if not (yield from _has_another(source, calls, is_list)):
                break
        yield from close(source, calls, self.closes)

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        name = yield from source.run(_NAME, LONGEST_NAME)
        yield from source.expect("(")
        calls.begin(name)
        before = "{"
        while True:
            yield from source.spaces()
            if (yield from source.peek()) == ")":
                source.at += 1
                break
            key = yield from source.run(_KEYWORD, LONGEST_KEY)
            yield from source.spaces()
            yield from source.expect("=")
            if not key:
                raise Malformed
            calls.arguments(f"{before}{quoted(key)}: ")
            before = ", "
            yield from _PYTHON.value(source, calls.arguments)
            yield from source.spaces()
            following = yield from source.peek()
            if following == ",":
                source.at += 1
            elif following != ")":
                raise Malformed
        calls.arguments("{}" if before == "{" else "}")
        calls.end()


@dataclass(frozen=True)
class GemmaCalls:
    """`call:name{key:value,…}`, where strings stand between `<escape>` and `<escape>`."""

    closes: Markers

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from source.spaces()
        if not (yield from source.take(_CALL)):
            raise Malformed
        name, _ = yield from source.field(_BRACE, LONGEST_NAME)
        calls.begin(name.strip())
        source.give_back(1)
        yield from _GEMMA.value(source, calls.arguments)
        calls.end()
        yield from close(source, calls, self.closes)


def _has_another(source: Source, calls: Calls, is_list: bool) -> Steps[bool]:
    yield from source.spaces()
    following = yield from source.peek()
    if following == "," or (not is_list and following == ";"):
        source.at += 1
        yield from source.spaces()
        return not source.is_used_up
    if is_list and not source.ended:
        yield from source.expect("]")
        calls.separated()
    return not is_list and (following.isalpha() or following == "_")
