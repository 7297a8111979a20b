"""Harmony, the format of gpt-oss: an answer is a sequence of messages, each in a channel, some of them to a tool.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>`
"""

from __future__ import annotations

import re

from penstock.text.formats.calls import MAX_NAME_CHARACTERS
from penstock.text.formats.json_calls import read_body
from penstock.text.formats.parser import Flow, SteppingParser
from penstock.text.formats.source import Malformed, Markers, Steps
from penstock.text.output import Reasoning

_MESSAGE = Markers("<|message|>")
_HEADERS = Markers("<|start|>", "<|channel|>")
_RECIPIENT_FIRST = Markers("to=")
_STOPS = Markers("<|end|>", "<|call|>", "<|return|>")
_ENDS = _STOPS | _HEADERS
_MAX_HEADER_CHARACTERS = MAX_NAME_CHARACTERS + 128

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_ANALYSIS = "<|channel|>analysis"
_FUNCTIONS = "functions."


class HarmonyParser(SteppingParser):
    """Messages in the channel `analysis` are reasoning, messages to a recipient are calls, all others are text, unchanged.

    Without tools, a message to a recipient is text. Text outside of messages is text; whitespace there is dropped.
    """

    def _read(self) -> Steps[None]:
        if self._begins_inside:
            yield from self._content(_ANALYSIS)
        while True:
            self._source.mark()
            yield from self._source.spaces()
            begun = (yield from self._source.take(_HEADERS)) or (yield from self._source.take(_RECIPIENT_FIRST))
            read = self._source.recorded()
            if begun:
                yield from self._message(read)
            elif self._source.is_used_up:
                return
            else:
                yield from self._outside(read)

    def _outside(self, spaces: str) -> Steps[None]:
        flow = Flow(self._out, str, _HEADERS, holds=False)
        flow.write(spaces)
        marker = yield from self._pass(flow)
        self._source.give_back(len(marker or ""))

    def _message(self, begun: str) -> Steps[None]:
        self._calls.open(begun)
        try:
            header, _ = yield from self._source.field(_MESSAGE, _MAX_HEADER_CHARACTERS)
            header = begun + header
            recipient = _RECIPIENT.search(header)
            if recipient and self._schemas:
                yield from self._call(recipient[1].removeprefix(_FUNCTIONS))
                self._calls.close()
                return
            self._calls.close()
        except Malformed:
            text = self._calls.give_up()
            if text:
                self._out.append(text)
            return
        yield from self._content(header)

    def _content(self, header: str) -> Steps[None]:
        channel = _CHANNEL.search(header)
        is_reasoning = channel is not None and channel[1] == "analysis"
        marker = yield from self._pass(Flow(self._out, Reasoning if is_reasoning else str, _ENDS, holds=False))
        if marker in _HEADERS.strings:
            self._source.give_back(len(marker or ""))

    def _call(self, name: str) -> Steps[None]:
        self._calls.begin(name)
        yield from read_body(self._source, self._calls, _STOPS)
        self._calls.end()
        yield from self._source.spaces()
        yield from self._source.take_end(_STOPS)
