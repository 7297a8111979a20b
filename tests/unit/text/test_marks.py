"""Where marks are in a rendered chat: templates that trim, rewrite and leave out; tokenizers of all kinds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from penstock.text.marks import Place, positions, tokens_before, with_marks
from penstock.text.template import ChatTemplates
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt
from penstock.text.tokenizers.words import WordTokenizer
from penstock.text.transcript import Transcripts

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TRIMMED = PLAIN.replace("m.content", "m.content | trim")
CHATTY = "{% for m in messages %}{{ m.content | length }}:{{ m.content }};{% endfor %}"


def chat(*contents: str) -> ChatPrompt:
    roles = ("system", "user", "assistant")
    return ChatPrompt([ChatMessage(role=roles[number % 3] if number else "system", content=each) for number, each in enumerate(contents)])


def found(template: str, prompt: ChatPrompt, *places: tuple[int, int]) -> list[str]:
    """What comes before each place."""
    templates = ChatTemplates({"default": template}, {})
    marks = [Place(*place) for place in places]
    text = templates.render(prompt)
    return [text[:position] for position in positions(text, templates.render(with_marks(prompt, marks)), len(prompt.messages), marks)]


def test_marks_in_and_behind_messages() -> None:
    prompt = chat("Be brief.", "Hello there")
    assert found(PLAIN, prompt, (0, 9), (1, 0), (1, 5), (1, 11)) == [
        "<system>Be brief.",
        "<system>Be brief.</><user>",
        "<system>Be brief.</><user>Hello",
        "<system>Be brief.</><user>Hello there",
    ]
    assert found(PLAIN, prompt, (2, 0)) == ["<system>Be brief.</><user>Hello there</><assistant>"]
    assert found(PLAIN, prompt, (1, 5), (1, 5)) == ["<system>Be brief.</><user>Hello"] * 2


def test_a_template_that_trims_is_not_kept_from_it() -> None:
    prompt = chat("Be brief. \n", "  Hello ", "Hi")
    assert found(TRIMMED, prompt, (0, 11), (1, 0), (1, 8), (2, 2)) == [
        "<system>Be brief.",
        "<system>Be brief.</><user>",
        "<system>Be brief.</><user>Hello",
        "<system>Be brief.</><user>Hello</><assistant>Hi",
    ]


def test_where_a_mark_changes_the_text_nothing_behind_that_is_certain() -> None:
    """This template writes how long a message is."""
    assert found(CHATTY, chat("Be brief.", "Hello"), (1, 5)) == ["9:Be brief.;"]


def test_a_mark_that_the_template_leaves_out_counts_as_the_one_before_it() -> None:
    text, marked = "ab", "a\udb00b"
    assert positions(text, marked, 3, [Place(0, 1), Place(1, 1), Place(2, 1)]) == [1, 1, 1]


def test_marks_do_not_change_the_tokens() -> None:
    tokenizer, contents = WordTokenizer(), ("You answer in one word.", "one two three four", "five", "six seven")

    async def encode(key: str | None, places: Sequence[Place]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        encoded = await Transcripts(1 << 20).encode_chat(key, "m", tokenizer, chat(*contents), places=places)
        return encoded.token_ids, encoded.marks

    places = [Place(0, 23), Place(1, 7), Place(1, 18), Place(3, 9), Place(4, 0)]
    plain, none = asyncio.run(encode(None, ()))
    for key in (None, "a session"):
        token_ids, marks = asyncio.run(encode(key, places))
        assert (token_ids, none) == (plain, ())
        ends = [tokenizer.decode(token_ids[:mark]) for mark in marks]
        assert [end[-5:] for end in ends[:-1]] == ["word.", "e two", " four", "seven"]
        assert marks[-1] == len(token_ids)


@pytest.mark.parametrize("position", range(0, 40, 3))
def test_tokens_are_counted_from_both_ends(position: int) -> None:
    tokenizer, text = WordTokenizer(), "one two three éééé four five six seven eight"
    token_ids = tokenizer.encode(text)
    before = tokens_before(tokenizer, iter([(text, token_ids)]), position)
    assert len(tokenizer.decode(token_ids[:before])) <= position < len(tokenizer.decode(token_ids[: before + 1]))
