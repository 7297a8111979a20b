"""Every recorded answer is parsed the same, however it is cut."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

import pytest

from answers.all_formats import BY_REASONING_FORMAT, BY_TOOL_FORMAT, all_transcripts
from answers.transcript import TOOLS, Transcript
from penstock.text.formats.make import make_parser
from penstock.text.formats.tables import REASONING_FORMATS, TOOL_FORMATS
from penstock.text.output import CallArguments, CallBegin, CallBroken, CallEnd, Part, Reasoning, joined

TRANSCRIPTS = all_transcripts()
FRAGMENTS_A_TEXT = 14


def parse(one: Transcript, pieces: Iterable[str]) -> list[Part]:
    parser = make_parser(one.tools, one.reasoning, TOOLS if one.schemas is None else one.schemas, one.inside)
    assert parser is not None
    parts = [part for piece in pieces for part in parser.feed(piece)]
    parts += parser.finish()
    assert "" not in parts
    return joined(parts)


def cut_at(text: str, places: Sequence[int]) -> list[str]:
    ends = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


def cut_at_random(text: str, chooser: random.Random) -> list[str]:
    return cut_at(text, [chooser.randrange(len(text) + 1) for _ in range(chooser.randrange(1, 12))])


def shown(parts: Sequence[Part]) -> str:
    """All text that a reader sees, without complete calls."""
    return "".join(part if isinstance(part, str) else part.text for part in parts if isinstance(part, (str, Reasoning, CallBroken)))


def check_calls(parts: Sequence[Part]) -> None:
    """Calls are numbered from 0. Each begins, and then ends or breaks; the arguments of one that ends are an object."""
    index = 0
    arguments: str | None = None
    for part in parts:
        match part:
            case CallBegin(number, name, _):
                assert number == index
                assert arguments is None
                assert name
                arguments = ""
            case CallArguments(number, text):
                assert number == index
                assert arguments is not None
                arguments += text
            case CallEnd(number):
                assert number == index
                assert isinstance(json.loads(arguments or ""), dict)
                index, arguments = index + 1, None
            case CallBroken(number, _):
                assert number == index
                assert arguments is not None
                index, arguments = index + 1, None
            case _:
                assert arguments is None
    assert arguments is None


@pytest.mark.parametrize("one", [one for _, one in TRANSCRIPTS], ids=[name for name, _ in TRANSCRIPTS])
class TestTranscript:
    def test_says_what_is_written_down(self, one: Transcript) -> None:
        assert parse(one, [one.text]) == one.parts

    def test_cut_anywhere(self, one: Transcript) -> None:
        for place in range(len(one.text) + 1):
            assert parse(one, cut_at(one.text, [place])) == one.parts, f"cut at {place}"

    def test_character_by_character(self, one: Transcript) -> None:
        assert parse(one, one.text) == one.parts

    def test_cut_at_random(self, one: Transcript) -> None:
        chooser = random.Random(one.text)
        for _ in range(8):
            pieces = cut_at_random(one.text, chooser)
            assert parse(one, pieces) == one.parts, pieces

    def test_every_beginning_of_it(self, one: Transcript) -> None:
        """Truncated anywhere, it is the same for any cut, its calls are whole or broken, and nothing is lost of what is no call."""
        chooser = random.Random(one.text)
        for end in range(len(one.text)):
            text = one.text[:end]
            parts = parse(one, [text])
            pieces = cut_at_random(text, chooser)
            assert parse(one, pieces) == parts, pieces
            check_calls(parts)
            if not any(isinstance(part, CallEnd) for part in parts) and "harmony" not in (one.tools, one.reasoning):
                check_nothing_lost(one, text, parts)


def check_nothing_lost(one: Transcript, text: str, parts: Sequence[Part]) -> None:
    """No character is lost, except whitespace and the markers of reasoning."""
    missing = Counter(text) - Counter(shown(parts))
    if one.reasoning is not None:
        reasoning = REASONING_FORMATS[one.reasoning]
        for marker in (*reasoning.opens.strings, *reasoning.closes.strings):
            missing -= Counter(marker * text.count(marker))
    assert not "".join(missing).strip(), missing


def test_each_format_has_its_transcripts() -> None:
    assert set(BY_TOOL_FORMAT) == set(TOOL_FORMATS)
    assert set(BY_REASONING_FORMAT) == set(REASONING_FORMATS)
    for name, transcripts in (*BY_TOOL_FORMAT.items(), *BY_REASONING_FORMAT.items()):
        assert len({one.text for one in transcripts}) >= 12, name


FORMATS = [(tools, None) for tools in TOOL_FORMATS] + [(tools, "think") for tools in TOOL_FORMATS if tools != "harmony"]


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
def test_garbage(tools: str, reasoning: str | None) -> None:
    """Random sequences of fragments are parsed the same for any cut, and never raise."""
    chooser = random.Random(f"{tools} {reasoning}")
    texts = [one.text for one in BY_TOOL_FORMAT[tools]]
    if reasoning is not None:
        texts += [one.text for one in BY_REASONING_FORMAT[reasoning]]
    for _ in range(60):
        pieces = []
        for _ in range(chooser.randrange(1, FRAGMENTS_A_TEXT)):
            text = chooser.choice(texts)
            start = chooser.randrange(len(text))
            pieces.append(text[start : start + chooser.randrange(1, 40)])
        one = Transcript("garbage", "".join(pieces), [], tools, reasoning, inside=chooser.random() < 0.3)
        parts = parse(one, [one.text])
        check_calls(parts)
        assert parse(one, one.text) == parts, one.text
        for _ in range(3):
            cuts = cut_at_random(one.text, chooser)
            assert parse(one, cuts) == parts, cuts


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
def test_markers_alone(tools: str, reasoning: str | None) -> None:
    """Markers, and text between them, in any order."""
    chooser = random.Random(f"{tools} {reasoning} markers")
    texts = [one.text for one in BY_TOOL_FORMAT[tools]]
    words = sorted({word for text in texts for word in text.replace(">", "> ").replace("{", " { ").replace('"', ' " ').split(" ")})
    for _ in range(60):
        text = "".join(chooser.choice([*words, "<think>", "</think>", " ", "\n"]) for _ in range(chooser.randrange(1, 30)))
        one = Transcript("garbage", text, [], tools, reasoning)
        parts = parse(one, [text])
        check_calls(parts)
        assert parse(one, text) == parts, text
        cuts = cut_at_random(text, chooser)
        assert parse(one, cuts) == parts, cuts
