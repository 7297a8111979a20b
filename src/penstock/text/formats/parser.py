"""The one incremental parser: text in, parts out. Formats are tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.text.formats.calls import Calls
from penstock.text.formats.source import NO_MARKERS, Malformed, Markers, Source, Steps
from penstock.text.formats.tables import Opening, ReasoningFormat, ToolFormat
from penstock.text.output import OutputParser, Part, Reasoning


@dataclass(slots=True)
class Flow:
    """Text or reasoning on its way out, up to one of some markers.

    With `trims`, whitespace at its start is dropped. With `holds`, whitespace at its end waits in `spaces` until it is known what follows.
    With `after_call`, a text of whitespace only is dropped.
    """

    out: list[Part]
    kind: Callable[[str], Part]
    markers: Markers
    trims: bool = False
    holds: bool = True
    after_call: bool = False
    spaces: list[str] = field(default_factory=list)
    has_begun: bool = False

    def write(self, text: str) -> None:
        body = text.rstrip() if self.holds else text
        if body:
            rest = "".join(self.spaces) + body
            self.spaces = []
            self._show(rest.lstrip() if self.trims and not self.has_begun else rest)
        if len(body) < len(text):
            self.spaces.append(text[len(body) :])

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, so that plain text goes out unchanged."""
        return self.has_begun and not self.spaces

    def straight(self, text: str) -> Part | None:
        """For an idle flow: plain text as a part. None if it may contain a marker, or must wait. Most tokens take only this path."""
        if self.markers.firsts.search(text) or (self.holds and text[-1].isspace()):
            return None
        return self.kind(text)

    def take_spaces(self) -> str:
        spaces = "".join(self.spaces)
        self.spaces = []
        return spaces

    def end(self) -> None:
        """Nothing follows: whitespace that waits goes out, unless it is dropped."""
        spaces = self.take_spaces()
        if self.has_begun or not (self.trims or self.after_call):
            self._show(spaces)

    def _show(self, text: str) -> None:
        if text:
            self.has_begun = True
            self.out.append(self.kind(text))


Schemas = Mapping[str, Mapping[str, Any]]


class SteppingParser(OutputParser):
    """Feeds a reader. Plain text goes straight through."""

    def __init__(self, schemas: Schemas, inside_reasoning: bool) -> None:
        self._schemas = schemas
        self._begins_inside = inside_reasoning
        self._source = Source()
        self._out: list[Part] = []
        self._calls = Calls(self._source, self._out, schemas)
        self._flow: Flow | None = None
        self._straight: Flow | None = None
        self._steps = self._read()

    def feed(self, text: str) -> Sequence[Part]:
        if not text:
            return ()
        if self._straight is not None and (part := self._straight.straight(text)) is not None:
            return (part,)
        self._source.add(text)
        next(self._steps)
        flow = self._flow
        self._straight = flow if flow is not None and flow.is_idle and self._source.is_used_up else None
        return self._taken()

    def finish(self) -> Sequence[Part]:
        if not self._source.ended:
            self._source.ended = True
            next(self._steps, None)
        return self._taken()

    def _read(self) -> Steps[None]:
        """Reads everything, up to the end."""
        raise NotImplementedError

    def _pass(self, flow: Flow) -> Steps[str | None]:
        """Lets text flow up to one of the flow's markers, and returns that. None at the end."""
        self._flow = flow
        marker = yield from self._source.until(flow.markers, flow.write)
        self._flow = None
        return marker

    def _taken(self) -> list[Part]:
        taken = self._out[:]
        self._out.clear()
        return taken


class FormatParser(SteppingParser):
    """Reasoning at the start, if the model has it, then text with calls in it.

    Whitespace is dropped before a call, between calls, after the last call at the end, and around reasoning. What begins as a call and is
    not one comes back as text, with the whitespace before it.
    """

    def __init__(self, tools: ToolFormat | None, reasoning: ReasoningFormat | None, schemas: Schemas, inside_reasoning: bool) -> None:
        self._openings = {opening.marker: opening for opening in tools.openings} if tools else {}
        self._bare = [opening for opening in self._openings.values() if opening.is_bare]
        self._markers = Markers(*(opening.marker for opening in self._openings.values() if not opening.is_bare))
        self._interrupts = self._markers if tools and tools.ends_reasoning else NO_MARKERS
        self._reasoning = reasoning
        super().__init__(schemas, inside_reasoning)

    def _read(self) -> Steps[None]:
        has_reasoned = (yield from self._read_reasoning(self._reasoning)) if self._reasoning else False
        self._begin_text(trims=has_reasoned)
        yield from self._read_bare()
        while True:
            marker = yield from self._pass(self._text)
            if marker is None:
                self._text.end()
                return
            yield from self._read_calls(self._openings[marker], self._text.take_spaces() + marker)

    def _begin_text(self, *, trims: bool = False, after_call: bool = False) -> None:
        self._text = Flow(self._out, str, self._markers, trims=trims, holds=bool(self._openings), after_call=after_call)

    def _read_reasoning(self, reasoning: ReasoningFormat) -> Steps[bool]:
        """Reads all reasoning at the start. Returns whether there was any."""
        is_inside = has_reasoned = self._begins_inside
        while True:
            self._source.mark()
            yield from self._source.spaces()
            if (yield from self._source.take(reasoning.opens)):
                is_inside = has_reasoned = True
            spaces = self._source.recorded()
            if not is_inside:
                # They belong to the text that follows.
                self._source.unread(spaces)
                return has_reasoned
            marker = yield from self._pass(Flow(self._out, Reasoning, reasoning.closes | self._interrupts, trims=True))
            if marker is None or marker in self._interrupts.strings:
                self._source.give_back(len(marker or ""))
                return True
            is_inside = False

    def _read_bare(self) -> Steps[None]:
        """Reads calls without a marker. They can only be at the start of the answer."""
        if not self._bare:
            return
        self._source.mark()
        yield from self._source.spaces()
        beginning = yield from self._source.peek()
        spaces = self._source.recorded()
        for opening in self._bare:
            if beginning == opening.marker:
                self._source.at += 1
                yield from self._read_calls(opening, spaces + opening.marker)
                return
        self._text.write(spaces)

    def _read_calls(self, opening: Opening, begun: str) -> Steps[None]:
        self._source.give_back(opening.given_back)
        self._calls.open(begun[: len(begun) - opening.given_back], known_only=opening.is_bare)
        before = self._calls.count
        try:
            yield from opening.body.read(self._source, self._calls)
            self._begin_text(after_call=True)
        except Malformed:
            text = self._calls.give_up()
            if self._calls.count > before:
                self._begin_text(after_call=True)
            self._text.write(text)
