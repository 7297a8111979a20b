"""However an answer comes in pieces, its blocks are the same: begun, filled and ended one after the other."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.api.anthropic.blocks import BlockDelta, Blocks, BlockStart, BlockStop, Step, unsealed, whole_blocks
from penstock.text.output import CallArguments, CallBegin, CallBroken, CallEnd, Part, Reasoning, joined

TEXTS = st.text("a \n", min_size=1, max_size=6)
INPUTS = st.dictionaries(st.sampled_from(["at", "ä"]), st.integers() | st.text(max_size=3), max_size=2)
SAID = st.one_of(
    st.tuples(st.just("text"), TEXTS),
    st.tuples(st.just("think"), TEXTS),
    st.tuples(st.just("call"), INPUTS),
    st.tuples(st.just("broken"), TEXTS),
)


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=3))) if len(text) > 1 else []
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def answers(draw: st.DrawFn) -> list[Part]:
    parts: list[Part] = []
    calls = 0
    for kind, value in draw(st.lists(SAID, max_size=6)):
        if kind == "text":
            parts += draw(pieces(str(value)))
        elif kind == "think":
            parts += [Reasoning(piece) for piece in draw(pieces(str(value)))]
        else:
            arguments = json.dumps(value) if kind == "call" else '{"at'
            parts += [CallBegin(calls, "look"), *(CallArguments(calls, piece) for piece in draw(pieces(arguments)))]
            parts.append(CallEnd(calls) if kind == "call" else CallBroken(calls, f"<look>{value}"))
            calls += 1
    return parts


def stream(parts: list[Part], shows_thinking: bool = True) -> list[Step]:
    blocks = Blocks(shows_thinking)
    steps: list[Step] = []
    for part in parts:
        steps += blocks.feed([part])
    return steps + blocks.finish()


def put_together(steps: list[Step]) -> list[dict[str, Any]]:
    """As a client does it; whatever is out of order fails."""
    whole: list[dict[str, Any]] = []
    inputs: list[str] = []
    is_open = False
    for step in steps:
        match step:
            case BlockStart(number, block):
                assert not is_open
                assert number == len(whole)
                whole.append(dict(block))
                inputs.append("")
            case BlockDelta(number, kind, text):
                assert is_open
                assert number == len(whole) - 1
                assert text
                if kind == "partial_json":
                    inputs[-1] += text
                else:
                    whole[-1][kind] += text
            case BlockStop(number):
                assert is_open
                assert number == len(whole) - 1
        is_open = not isinstance(step, BlockStop)
    assert not is_open
    for block, text in zip(whole, inputs, strict=True):
        if text and text != '{"at':
            block["input"] = json.loads(text)
    return whole


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


@given(answers())
def test_any_pieces_make_the_blocks_of_the_whole(parts: list[Part]) -> None:
    blocks = put_together(stream(parts))
    assert without_ids(blocks) == without_ids(put_together(stream(joined(parts))))
    if not any(isinstance(part, CallBroken) for part in parts):
        assert without_ids(blocks) == without_ids(whole_blocks(joined(parts)))


@given(answers())
def test_no_block_is_empty_and_nothing_is_lost(parts: list[Part]) -> None:
    blocks = whole_blocks(joined(parts))
    for block in blocks:
        if block["type"] == "text":
            assert block["text"].strip() or len(blocks) == 1
        elif block["type"] == "thinking":
            assert block["thinking"]
            assert block["signature"]
    said = "".join(part if isinstance(part, str) else part.text for part in parts if isinstance(part, str | CallBroken))
    shown = "".join(block["text"] for block in blocks if block["type"] == "text")
    assert "".join(shown.split()) == "".join(said.split())
    thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
    assert "".join(block.get("thinking", "") for block in blocks) == thought
    called = sum(isinstance(part, CallEnd) for part in parts)
    assert sum(block["type"] == "tool_use" for block in blocks) == called


@given(answers())
def test_thinking_that_is_not_shown_is_in_the_signature(parts: list[Part]) -> None:
    shown = [block["thinking"] for block in put_together(stream(parts)) if block["type"] == "thinking"]
    hidden = [block for block in put_together(stream(parts, shows_thinking=False)) if block["type"] == "thinking"]
    assert [block["thinking"] for block in hidden] == [""] * len(shown)
    assert [unsealed(block["signature"]) for block in hidden] == shown


def test_the_order_of_a_turn_with_everything() -> None:
    parts: list[Part] = [
        Reasoning("h"),
        Reasoning("m"),
        "\n\n",
        "I ",
        "look.",
        "\n",
        CallBegin(0, "look", "my-id"),
        CallArguments(0, '{"a'),
        CallArguments(0, '":1}'),
        CallEnd(0),
        "\n",
    ]
    steps = stream(parts)
    signature = steps[3]
    assert isinstance(signature, BlockDelta)
    assert signature.kind == "signature"
    assert signature.text
    assert steps == [
        BlockStart(0, {"type": "thinking", "thinking": "", "signature": ""}),
        BlockDelta(0, "thinking", "h"),
        BlockDelta(0, "thinking", "m"),
        signature,
        BlockStop(0),
        BlockStart(1, {"type": "text", "text": ""}),
        BlockDelta(1, "text", "\n\nI "),
        BlockDelta(1, "text", "look."),
        BlockDelta(1, "text", "\n"),
        BlockStop(1),
        BlockStart(2, {"type": "tool_use", "id": "my-id", "name": "look", "input": {}}),
        BlockDelta(2, "partial_json", '{"a'),
        BlockDelta(2, "partial_json", '":1}'),
        BlockStop(2),
    ]


def test_a_broken_call_ends_and_is_text() -> None:
    parts: list[Part] = ["Well. ", CallBegin(0, "look"), CallArguments(0, '{"at'), CallBroken(0, '<look>{"at oops'), " Yes."]
    streamed = put_together(stream(parts))
    assert [block["type"] for block in streamed] == ["text", "tool_use", "text"]
    assert streamed[2]["text"] == '<look>{"at oops Yes.'
    assert whole_blocks(parts) == [{"type": "text", "text": 'Well. <look>{"at oops Yes.'}]


def test_an_answer_of_whitespace_is_that() -> None:
    assert whole_blocks([" \n"]) == [{"type": "text", "text": " \n"}]
    assert whole_blocks([]) == []
