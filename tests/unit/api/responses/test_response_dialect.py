"""Parts of an answer become items and numbered events, the same for any chunking."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from front_end import response_object
from penstock.api.pipeline.dialect import Answer, ChoiceDelta, Ending, Usage
from penstock.api.responses.answers import ResponseFailure
from penstock.api.responses.dialect import ResponseDialect
from penstock.api.responses.tools import CalledTool
from penstock.text.output import CallArguments, CallBegin, CallBroken, CallEnd, Part, Reasoning, joined
from penstock.wire.errors import GenerationFault, RequestError
from penstock.wire.messages import Delta, Fault, TokenLogprob

USAGE = Usage(7, 5, 3, 2)
STOP = Ending("stop")


def make_dialect(**rest: Any) -> ResponseDialect:
    return ResponseDialect(
        response_object(), lambda token_id: b"<%d>" % token_id, {"patch": CalledTool("patch", is_custom=True)}, clock=lambda: 100.0, **rest
    )


def events_of(rendered: bytes) -> list[dict[str, Any]]:
    """The events as a client reads them, with their numbers checked."""
    found = []
    for text in rendered.split(b"\n\n")[:-1]:
        event, data = text.split(b"\n")
        decoded = msgspec.json.decode(data.removeprefix(b"data: "))
        assert event == b"event: " + decoded["type"].encode()
        found.append(decoded)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def stream(additions: Sequence[Sequence[Part]], ending: Ending = STOP, dialect: ResponseDialect | None = None) -> list[dict[str, Any]]:
    dialect = dialect or make_dialect()
    rendered = dialect.begin(USAGE)
    for parts in additions:
        rendered += dialect.event(0, ChoiceDelta(parts))
    rendered += dialect.event(0, ChoiceDelta((), ending=ending))
    return events_of(rendered + dialect.end(USAGE))


def names(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def structure(events: Sequence[dict[str, Any]]) -> list[tuple[str, object]]:
    """The events without deltas, each with its output index."""
    return [(name, event.get("output_index")) for name, event in zip(names(events), events, strict=True) if not name.endswith("delta")]


def without_ids(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_text() -> None:
    events = stream([["Hel"], ["lo"]])
    assert names(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    added, part, first, _, done, part_done, item_done, completed = events[2:]
    assert added["item"]["status"] == "in_progress"
    assert added["item"]["content"] == []
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert (first["delta"], first["logprobs"], first["content_index"], first["output_index"]) == ("Hel", [], 0, 0)
    assert first["item_id"] == added["item"]["id"] == part["item_id"] == done["item_id"]
    assert done["text"] == part_done["part"]["text"] == "Hello"
    assert item_done["item"]["status"] == "completed"
    response = completed["response"]
    assert response["output"] == [item_done["item"]]
    assert (response["status"], response["completed_at"]) == ("completed", 100)
    assert (response["error"], response["incomplete_details"]) == (None, None)
    assert response["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }


def test_reasoning_text_and_two_calls() -> None:
    parts: list[Part] = [
        Reasoning("So"),
        "\n\n",
        "Right.",
        CallBegin(0, "look", "call_a"),
        CallArguments(0, '{"a":'),
        CallArguments(0, "1}"),
        CallEnd(0),
        "\n",
        CallBegin(1, "patch"),
        CallArguments(1, '{"input":"*** \\u00e9"}'),
        CallEnd(1),
    ]
    events = stream([parts], Ending("tool_calls"))
    assert names(events)[2:-1] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    reasoning, message, call, custom = events[-1]["response"]["output"]
    assert (reasoning["summary"], reasoning["content"]) == ([], [{"type": "reasoning_text", "text": "So"}])
    assert message["content"][0]["text"] == "\n\nRight.", "white space that a text begins with is its own"
    assert (call["call_id"], call["name"], call["arguments"], call["status"]) == ("call_a", "look", '{"a":1}', "completed")
    assert (custom["name"], custom["input"]) == ("patch", "*** é")
    prefixes = [item["id"].split("_")[0] for item in (reasoning, message, call, custom)]
    assert prefixes == ["rs", "msg", "fc", "ctc"]
    assert events[-1]["response"]["status"] == "completed"


def test_a_broken_call_becomes_text() -> None:
    parts: list[Part] = [CallBegin(0, "look"), CallArguments(0, '{"a'), CallBroken(0, '<call>{"a oops'), " and more"]
    events = stream([parts])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["type"], item["status"]) for item in done] == [("function_call", "incomplete"), ("message", "completed")]
    (message,) = events[-1]["response"]["output"]
    assert message["content"][0]["text"] == '<call>{"a oops and more'
    dialect = make_dialect()
    whole = msgspec.json.decode(b"".join(dialect.body([Answer(parts, [], STOP)], USAGE, None)))
    assert without_ids(whole["output"]) == without_ids([message])


def test_in_a_whole_answer_a_broken_call_does_not_split_the_message() -> None:
    parts: list[Part] = ["See: ", CallBegin(0, "look"), CallArguments(0, '{"a'), CallBroken(0, '<call>{"a'), " oops"]
    (message,) = msgspec.json.decode(b"".join(make_dialect().body([Answer(parts, [], STOP)], USAGE, None)))["output"]
    assert message["content"][0]["text"] == 'See: <call>{"a oops'


@pytest.mark.parametrize("parts", [[], ["  \n"]])
def test_an_answer_without_words_has_a_message(parts: list[Part]) -> None:
    (message,) = stream([parts])[-1]["response"]["output"]
    assert message["content"][0]["text"] == "".join(str(part) for part in parts)


def test_length() -> None:
    events = stream([["Hel"]], Ending("length"))
    assert names(events)[-2:] == ["output_item.done", "incomplete"]
    assert events[-2]["item"]["status"] == "incomplete"
    response = events[-1]["response"]
    assert (response["status"], response["incomplete_details"], response["completed_at"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
        None,
    )


def test_a_fault_in_the_middle_of_a_stream() -> None:
    dialect = make_dialect()
    rendered = dialect.begin(USAGE) + dialect.event(0, ChoiceDelta(["Hel"])) + dialect.fault(Fault("worker_lost", "it is gone"))
    events = events_of(rendered)
    assert names(events)[-2:] == ["output_item.done", "failed"]
    response = events[-1]["response"]
    assert (response["status"], response["error"]) == ("failed", {"code": "server_error", "message": "worker_lost: it is gone"})
    assert response["output"][0]["content"][0]["text"] == "Hel"


@pytest.mark.parametrize(("status", "code"), [(429, "rate_limit_exceeded"), (400, "invalid_prompt"), (503, "server_error")])
def test_the_error_of_a_failed_response(status: int, code: str) -> None:
    dialect = make_dialect()
    dialect.fail(RequestError("no", code="why", status=status))
    assert dialect.snapshot().error == ResponseFailure(code, "why: no")


def test_a_background_response_starts_queued() -> None:
    dialect = make_dialect()
    assert dialect.snapshot().status == "queued"
    rendered = dialect.queue() + dialect.begin(USAGE) + dialect.event(0, ChoiceDelta(["Hel"]))
    assert not dialect.is_over
    assert dialect.snapshot().status == "in_progress"
    events = events_of(rendered + dialect.cancel())
    assert names(events)[:3] == ["created", "queued", "in_progress"]
    assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
    assert names(events)[-1] == "incomplete"
    assert events[-1]["response"]["status"] == "cancelled"
    assert dialect.is_over


def test_what_is_sent_again_and_again_is_short() -> None:
    long = "x" * 100_000
    fields = {"instructions": long, "user": long, "safety_identifier": long, "metadata": {"a": long}, "tools": [{"type": long}]}
    dialect = ResponseDialect(response_object(**fields, text={"a": long}, tool_choice={"type": long}), lambda _: b"")
    begun = events_of(dialect.announce())
    assert begun[-1]["response"]["user"] == long
    again = dialect.keep_alive()
    assert len(again) < 2000
    assert b'"sequence_number":1}' in again


def test_an_end_that_cannot_be_stored_becomes_a_failure() -> None:
    dialect = make_dialect()
    begun = dialect.begin(USAGE) + dialect.event(0, ChoiceDelta(["Hel"], ending=STOP))
    last = dialect.event(0, ChoiceDelta(["lo"])) + dialect.end(USAGE)
    events = events_of(begun + dialect.fail_instead(last, RequestError("full", code="store_unavailable", status=503)))
    assert names(events)[-1] == "failed"
    assert "completed" not in names(events)


def test_nvext() -> None:
    dialect = make_dialect()
    dialect.begin(USAGE)
    dialect.event(0, ChoiceDelta(["a"], ending=STOP, nvext={"session": 1}))
    dialect.end(USAGE)
    assert dialect.snapshot().nvext == {"session": 1}
    whole = msgspec.json.decode(b"".join(make_dialect().body([Answer(["a"], [], STOP)], USAGE, {"session": 1})))
    assert whole["nvext"] == {"session": 1}


def test_logprobs() -> None:
    dialect = make_dialect()
    delta = Delta(0, (1, 2), logprobs=(TokenLogprob(-0.5, ((1, -0.5), (9, -1.0))), TokenLogprob(-0.25, ())))
    logprobs = dialect.logprobs(0, delta, 2)
    first = {"token": "<1>", "logprob": -0.5, "bytes": list(b"<1>")}
    other = {"token": "<9>", "logprob": -1.0, "bytes": list(b"<9>")}
    second = {"token": "<2>", "logprob": -0.25, "bytes": list(b"<2>"), "top_logprobs": []}
    assert logprobs == [{**first, "top_logprobs": [first, other]}, second]
    rendered = dialect.begin(USAGE) + dialect.event(0, ChoiceDelta(["<1><2>"], logprobs, ending=STOP)) + dialect.end(USAGE)
    events = {event["type"]: event for event in events_of(rendered)}
    assert events["response.output_text.delta"]["logprobs"] == logprobs
    assert events["response.output_text.done"]["logprobs"] == logprobs
    assert events["response.completed"]["response"]["output"][0]["content"][0]["logprobs"] == logprobs


def test_each_message_of_a_whole_answer_has_its_own_logprobs() -> None:
    dialect = make_dialect()
    delta = Delta(0, (1, 2, 3), logprobs=(TokenLogprob(-1.0, ()),) * 3)
    answer = Answer([Reasoning("<1>"), "<2>"], [dialect.logprobs(0, delta, 3)], STOP)
    whole = msgspec.json.decode(b"".join(dialect.body([answer], USAGE, None)))
    assert [entry["token"] for entry in whole["output"][1]["content"][0]["logprobs"]] == ["<2>"]


def test_logprobs_of_a_text_that_the_reasoning_contains_too() -> None:
    parts: list[Part] = [Reasoning("<1>"), CallBegin(0, "look"), CallArguments(0, "<1>"), CallEnd(0), "<1>"]
    delta = Delta(0, (1, 1, 7, 1), logprobs=tuple(TokenLogprob(-float(place), ()) for place in range(4)))
    for cuts in ([0, 4], [0, 1, 2, 3, 4], [0, 3, 4], [0, 1, 4]):
        dialect = make_dialect()
        rendered = dialect.begin(USAGE)
        shown = dialect.logprobs(0, delta, 4)
        assert isinstance(shown, list)
        additions: list[list[Part]] = [parts[:1], parts[1:4], [], parts[4:]]
        for begin, end in pairwise(cuts):
            added = [part for addition in additions[begin:end] for part in addition]
            rendered += dialect.event(0, ChoiceDelta(added, shown[begin:end]))
        events = events_of(rendered + dialect.event(0, ChoiceDelta((), ending=STOP)) + dialect.end(USAGE))
        (piece,) = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [entry["logprob"] for entry in piece["logprobs"]] == [-3.0]
        assert [entry["logprob"] for entry in events[-1]["response"]["output"][-1]["content"][0]["logprobs"]] == [-3.0]
    whole = msgspec.json.decode(dialect_body(parts, delta))
    assert [entry["logprob"] for entry in whole["output"][-1]["content"][0]["logprobs"]] == [-3.0]


def dialect_body(parts: Sequence[Part], delta: Delta) -> bytes:
    dialect = make_dialect()
    return b"".join(dialect.body([Answer(parts, [dialect.logprobs(0, delta, len(delta.token_ids))], STOP)], USAGE, None))


@pytest.mark.parametrize("held_back", [1, 2])
def test_logprobs_of_delayed_text_arrive_with_it(held_back: int) -> None:
    dialect = make_dialect()
    delta = Delta(0, (1, 2, 3), logprobs=tuple(TokenLogprob(-float(place), ()) for place in range(3)))
    shown = dialect.logprobs(0, delta, 3)
    assert isinstance(shown, list)
    rendered = dialect.begin(USAGE) + dialect.event(0, ChoiceDelta((), shown[:held_back]))
    rendered += dialect.event(0, ChoiceDelta(["<1><2>"], shown[held_back:2])) + dialect.event(
        0, ChoiceDelta(["<3>"], shown[2:], ending=STOP)
    )
    events = events_of(rendered + dialect.end(USAGE))
    pieces = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert pieces == [shown[:2], shown[2:]]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == shown


def test_an_end_that_looks_like_an_event_becomes_a_failure() -> None:
    dialect = make_dialect()
    begun = dialect.begin(USAGE) + dialect.event(0, ChoiceDelta(["event: response.completed"], ending=STOP))
    events = events_of(begun + dialect.fail_instead(dialect.end(USAGE), RequestError("full", status=503)))
    assert names(events)[-2:] == ["output_item.done", "failed"]
    assert events[-1]["response"]["completed_at"] is None


TEXTS = st.text(alphabet="ab \n", min_size=1, max_size=6)
CALLS = st.tuples(st.sampled_from(["look", "patch"]), st.text(alphabet="ab", max_size=4), st.booleans())


@st.composite
def answers(draw: st.DrawFn) -> list[Part]:
    parts: list[Part] = []
    count = 0
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["text", "reasoning", "call"]))
        if kind == "text":
            parts.append(draw(TEXTS))
        elif kind == "reasoning":
            parts.append(Reasoning(draw(TEXTS)))
        else:
            name, value, is_broken = draw(CALLS)
            arguments = msgspec.json.encode({"input": value}).decode()
            ending = CallBroken(count, f"<{arguments}") if is_broken else CallEnd(count)
            parts += [CallBegin(count, name, f"call_{count}"), CallArguments(count, arguments), ending]
            count += 1
    return parts


@st.composite
def chunked(draw: st.DrawFn) -> tuple[list[Part], list[list[Part]]]:
    """An answer, and the same answer in random pieces."""
    parts = draw(answers())
    additions: list[list[Part]] = [[]]
    for part in parts:
        text = part if isinstance(part, str) else getattr(part, "text", "") if not isinstance(part, CallBroken) else ""
        cut = draw(st.integers(0, len(text))) if text else 0
        pieces: list[Part] = [part]
        if 0 < cut < len(text):
            if isinstance(part, str):
                pieces = [part[:cut], part[cut:]]
            elif isinstance(part, Reasoning):
                pieces = [Reasoning(text[:cut]), Reasoning(text[cut:])]
            elif isinstance(part, CallArguments):
                pieces = [CallArguments(part.index, text[:cut]), CallArguments(part.index, text[cut:])]
        for piece in pieces:
            additions[-1].append(piece)
            if draw(st.booleans()):
                additions.append([])
    return parts, additions


@given(chunked())
def test_any_chunking_gives_the_same_answer(case: tuple[list[Part], list[list[Part]]]) -> None:
    parts, additions = case
    whole, pieces = stream([parts]), stream(additions)
    assert structure(whole) == structure(pieces)
    assert without_ids(whole[-1]["response"]["output"]) == without_ids(pieces[-1]["response"]["output"])
    body = msgspec.json.decode(b"".join(make_dialect().body([Answer(joined(parts), [], STOP)], USAGE, None)))
    streamed = without_ids(pieces[-1]["response"]["output"])
    assert _texts(body["output"]) == _texts(pieces[-1]["response"]["output"])
    calls = [item for item in without_ids(body["output"]) if "call" in item["type"]]
    assert [item for item in streamed if "call" in item["type"]] == calls


@given(chunked())
def test_deltas_add_up_and_every_item_is_opened_and_done_once(case: tuple[list[Part], list[list[Part]]]) -> None:
    events = stream(case[1])
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    done = {event["output_index"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    assert added == sorted(done) == list(range(len(added)))
    for index, item in done.items():
        deltas = "".join(event["delta"] for event in events if event.get("output_index") == index and "delta" in event)
        if item["status"] != "completed":
            continue
        value = item["content"][0]["text"] if "content" in item else item.get("arguments", item.get("input"))
        assert deltas == value


def _texts(output: Sequence[dict[str, Any]]) -> str:
    return "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"]).strip()


def test_a_fault_and_a_request_error_have_the_same_form() -> None:
    dialect = make_dialect()
    dialect.fail(GenerationFault(Fault("queue_full", "wait")))
    assert dialect.snapshot().error == ResponseFailure("rate_limit_exceeded", "queue_full: wait")
