"""What engines are asked over HTTP, and what is read of their answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.backends.external.engine import Chunk, EngineImage, EngineRefused, EngineRequest, PromptImages
from penstock.backends.external.image_events import image_uuid
from penstock.backends.http.completions import CompletionsDialect, VllmDialect
from penstock.backends.http.dialects import Dialect, Reader, SglangDialect, SglangTraits, message_in
from penstock.backends.http.text import TextDialect, byte_tokens
from penstock.backends.sglang.requests import PRIORITY_SECONDS
from penstock.wire.messages import Fault, Sampling, TokenLogprob
from tokenizer_kinds import tokenizer_of

TOKENIZER = tokenizer_of("llama3")
TEXT = TextDialect("model", TOKENIZER, byte_tokens(TOKENIZER))
VLLM = VllmDialect("model", has_grammar=True)
COMPLETIONS = CompletionsDialect("model", has_logprob_ids=True, has_grammar=True)
ALL_ON = SglangTraits(True, has_grammar=True, has_sessions=True, priority="scheduling")


def request(**fields: Any) -> EngineRequest:
    return EngineRequest(**{"id": "0" * 32, "token_ids": (5, 6, 7), "max_tokens": 10, "seed": 1, **fields})


def read_all(reader: Reader, *events: dict[str, Any]) -> list[Chunk]:
    chunks = [chunk for event in events if (chunk := reader.read(json.dumps(event).encode())) is not None]
    return [*chunks, reader.last()] if reader.is_finished else chunks


def fault_of(reader: Reader, *events: dict[str, Any]) -> Fault:
    with pytest.raises(EngineRefused) as caught:
        read_all(reader, *events)
    return caught.value.fault


# SGLang.


def sglang(ids: list[int], count: int, finish: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    about = {"completion_tokens": count, "finish_reason": finish, "cached_tokens": 2, **meta}
    return {"text": "whatever", "output_ids": ids, "meta_info": about}


def sglang_reader(is_incremental: bool, **fields: Any) -> Reader:
    return SglangDialect(SglangTraits(is_incremental)).reader(request(**{"max_tokens": 3, **fields}))


LENGTH = {"type": "length", "length": 3}


def test_sglang_in_both_modes() -> None:
    told = [Chunk((1, 2), cached_tokens=2), Chunk((3,), finish="length", cached_tokens=2)]
    assert read_all(sglang_reader(True), sglang([1, 2], 2), sglang([3], 3, LENGTH)) == told
    assert read_all(sglang_reader(False), sglang([1, 2], 2), sglang([1, 2, 3], 3, LENGTH)) == told


@pytest.mark.parametrize("is_incremental", [True, False])
def test_a_wrong_mode_is_noticed_at_the_second_event(is_incremental: bool) -> None:
    second = sglang([1, 2] if is_incremental else [2], 2)
    assert "contradicts itself" in fault_of(sglang_reader(is_incremental), sglang([1], 1), second).message


def test_the_tokens_of_an_abort_are_not_read() -> None:
    reader = sglang_reader(True)
    assert read_all(reader, sglang([1], 1)) == [Chunk((1,), cached_tokens=2)]
    fault = fault_of(reader, sglang([1, 99], 1, {"type": "abort", "message": "Aborted"}))
    assert fault.retryable
    assert not reader.is_finished
    refusal = {"type": "abort", "message": "too long", "status_code": 400}
    assert not fault_of(sglang_reader(True), sglang([4], 1, refusal)).retryable


def test_an_error_event_is_a_refusal() -> None:
    error = {"error": {"message": "bad params", "type": "invalid_request_error", "code": 400, "retryable": False}}
    assert fault_of(sglang_reader(True), error) == Fault("engine_refused", "the engine answered 400: bad params")
    busy = {"error": {"message": "queue is full", "code": 503}}
    assert fault_of(sglang_reader(True), busy).retryable


def test_what_a_penstock_refuses_in_its_stream_is_not_tried_elsewhere() -> None:
    """Another attempt would kill more workers."""
    killer = {"error": {"message": "2 workers died", "type": "invalid_request_error", "param": None, "code": "kills_workers"}}
    assert fault_of(COMPLETIONS.reader(request()), killer) == Fault("engine_refused", "the engine answered 400: 2 workers died")
    gone = {"error": {"message": "no worker came", "type": "server_error", "param": None, "code": "no_worker"}}
    assert fault_of(COMPLETIONS.reader(request()), gone).retryable


def test_with_ignore_eos_stop_ids_are_checked_here() -> None:
    """SGLang ignores them, so the request must be aborted."""
    reader = sglang_reader(True, ignore_eos=True, stop_ids=(2,))
    assert read_all(reader, sglang([1, 2, 3], 3)) == [Chunk((1, 2), finish="stop", cached_tokens=2)]
    assert not reader.is_over


def test_sglangs_logprobs() -> None:
    reader = SglangDialect(SglangTraits(is_incremental=False)).reader(request(max_tokens=2, logprobs=1))
    first: dict[str, Any] = {"output_token_logprobs": [[-0.5, 1, None]], "output_top_logprobs": [[[-0.5, 1, None]]]}
    second: dict[str, Any] = {
        "output_token_logprobs": [[-0.5, 1, None], [-2, 9, None]],
        "output_top_logprobs": [[[-0.5, 1, None]], [[-1, 8, None]]],
    }
    chunks = read_all(reader, sglang([1], 1, **first), sglang([1, 9], 2, {"type": "stop", "matched": 9}, **second))
    assert [chunk.logprobs for chunk in chunks] == [(TokenLogprob(-0.5, ((1, -0.5),)),), (TokenLogprob(-2, ((8, -1),)),)]


@pytest.mark.parametrize("garbage", ["[]", "{}", '{"output_ids": 5, "meta_info": {}}', "nonsense", '{"meta_info": {"finish_reason": 3}}'])
def test_garbage_is_a_retryable_loss(garbage: str) -> None:
    with pytest.raises(EngineRefused) as caught:
        sglang_reader(True).read(garbage.encode())
    assert caught.value.fault.code == "engine_lost"
    assert caught.value.fault.retryable


def test_the_body_for_sglang() -> None:
    everything = request(
        seed=2**63 - 1,
        sampling=Sampling(temperature=0.5, top_k=4),
        stop_ids=(3,),
        logit_bias=((7, -1.5),),
        lark='start: "a"',
        session_id="s",
        priority=4,
        logprobs=2,
    )
    body = SglangDialect(ALL_ON).body(everything)
    assert body["rid"] == everything.id
    assert (body["input_ids"], body["stream"], body["session_id"], body["priority"]) == ([5, 6, 7], True, "s", 4)
    assert (body["return_logprob"], body["top_logprobs_num"], body["logprob_start_len"]) == (True, 2, -1)
    params = body["sampling_params"]
    assert params["sampling_seed"] == 2**63 - 1
    assert (params["top_k"], params["ebnf"], params["logit_bias"], params["stop_token_ids"]) == (4, 'start: "a"', {"7": -1.5}, [3])
    # A server fills in its own where nothing is sent.
    assert params.keys() >= set(Sampling.__struct_fields__)


def test_features_that_the_server_lacks_are_refused() -> None:
    plain = SglangDialect(SglangTraits(is_incremental=True))
    body = plain.body(request(session_id="s", priority=3))
    assert not body.keys() & {"session_id", "priority", "return_logprob"}
    assert body["sampling_params"]["top_k"] == -1
    with pytest.raises(EngineRefused) as caught:
        plain.body(request(lark="start: x"))
    assert caught.value.fault.code == "unsupported"


@pytest.mark.parametrize("dialect", [SglangDialect(ALL_ON), VLLM, COMPLETIONS, TEXT])
def test_a_salt_is_sent(dialect: Dialect) -> None:
    assert dialect.body(request(salt="0a"))["cache_salt"] == "0a"
    assert "cache_salt" not in dialect.body(request())


def test_retained_kv_is_worth_more() -> None:
    dialect = SglangDialect(SglangTraits(True, priority="eviction"))
    kept = {"keep_seconds": 2.5 * PRIORITY_SECONDS}
    plain, important, retained = (dialect.body(request(**fields))["priority"] for fields in ({}, {"priority": 2}, kept))
    assert plain < important < retained


def test_under_a_grammar_the_end_is_never_banned() -> None:
    asked = request(lark='start: "a"', min_tokens=5, ignore_eos=True)
    assert SglangDialect(ALL_ON).body(asked)["sampling_params"]["min_new_tokens"] == 0
    for body in (VLLM.body(asked)["sampling_params"], COMPLETIONS.body(asked)):
        assert not body.get("min_tokens")
        assert not body["ignore_eos"]


# vLLM and OpenAI.


def choice(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, **fields}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}}


@pytest.mark.parametrize("dialect", [VLLM, COMPLETIONS])
def test_tokens_come_as_they_are(dialect: Dialect) -> None:
    events = [choice(text="x", token_ids=[1]), choice(text="", token_ids=[2, 3], finish_reason="stop"), USAGE]
    assert read_all(dialect.reader(request()), *events) == [Chunk((1,)), Chunk((2, 3), finish="stop", cached_tokens=2)]


def test_the_most_likely_alternatives_are_kept() -> None:
    """vLLM's token route counts the token itself, and sends it first."""
    top = [{"token_id": 9, "logprob": -4.0}, {"token_id": 1, "logprob": -0.1}, {"token_id": 2, "logprob": -0.2}]
    told = {"content": [{"token_id": 9, "logprob": -4.0, "top_logprobs": top}]}
    wanted = request(logprobs=2)
    assert VLLM.body(wanted)["sampling_params"]["logprobs"] == 3
    (chunk,) = read_all(VLLM.reader(wanted), choice(token_ids=[9], logprobs=told, finish_reason="length"))
    assert chunk.logprobs == (TokenLogprob(-4.0, ((1, -0.1), (2, -0.2))),)
    marked = {
        "tokens": ["token_id:9"],
        "token_logprobs": [-4.0],
        "top_logprobs": [{"token_id:9": -4.0, "token_id:1": -0.1, "token_id:2": -0.2}],
    }
    (chunk,) = read_all(COMPLETIONS.reader(wanted), choice(text="x", token_ids=[9], logprobs=marked, finish_reason="length"))
    assert chunk.logprobs == (TokenLogprob(-4.0, ((1, -0.1), (2, -0.2))),)


def test_at_most_the_alternatives_that_vllm_allows_are_requested() -> None:
    assert VLLM.body(request(logprobs=20))["sampling_params"]["logprobs"] == 20
    assert VLLM.body(request(logprobs=0))["sampling_params"]["logprobs"] == 0


def test_prompt_logprobs_are_not_streamed() -> None:
    wanted = request(prompt_logprobs=True, logprobs=1)
    told = [None, {"6": {"logprob": -3.0, "rank": 9}, "4": {"logprob": -0.5, "rank": 1}}, {"7": {"logprob": -0.25, "rank": 1}}]
    expected = (None, TokenLogprob(-3.0, ((4, -0.5),)), TokenLogprob(-0.25, ((7, -0.25),)))
    content = {"content": [{"token_id": 1, "logprob": -1.0, "top_logprobs": [{"token_id": 1, "logprob": -1.0}]}]}
    whole = choice(token_ids=[1], finish_reason="length", logprobs=content) | {"prompt_logprobs": told}
    (chunk,) = read_all(VLLM.reader(wanted), whole)
    assert chunk.prompt_logprobs == expected
    assert [dialect.body(wanted)["stream"] for dialect in (VLLM, COMPLETIONS, SglangDialect(ALL_ON))] == [False] * 3
    assert fault_of(VLLM.reader(wanted), choice(token_ids=[1], finish_reason="length")).retryable


@pytest.mark.parametrize("dialect", [VLLM, COMPLETIONS, TEXT])
def test_contradictory_answers_are_a_retryable_loss(dialect: Dialect) -> None:
    for event in (choice(token_ids=[1], finish_reason="abort"), choice(token_ids=["x"]), {"choices": 5}):
        fault = fault_of(dialect.reader(request()), event)
        assert (fault.code, fault.retryable) == ("engine_lost", True)
    end = choice(text="a", token_ids=[1], finish_reason="stop")
    assert "after its finish" in fault_of(dialect.reader(request()), end, end).message


def test_text_without_token_ids_is_a_loss() -> None:
    assert fault_of(COMPLETIONS.reader(request()), choice(text="lost")).retryable
    missing = choice(token_ids=[1], logprobs=None)
    assert "0 logprobs for 1 tokens" in fault_of(COMPLETIONS.reader(request(logprobs=1)), missing).message


def test_a_grammar_is_for_llguidance_alone() -> None:
    """Another library would read it in another way."""
    wanted = request(lark='start: "a"')
    assert VLLM.body(wanted)["sampling_params"]["structured_outputs"] == {"grammar": '%llguidance {}\nstart: "a"'}
    again = request(lark='%llguidance {"no_forcing": true}\nstart: "a"')
    plain = CompletionsDialect("model", has_logprob_ids=True, has_grammar=True, grammar_prefix="")
    assert plain.body(wanted)["structured_outputs"] == {"grammar": 'start: "a"'}
    assert COMPLETIONS.body(again)["structured_outputs"]["grammar"].count("%llguidance") == 1


def test_text_becomes_tokens_and_its_end_the_end_token() -> None:
    events = [choice(text="gr\u00f6"), choice(text="\u00dfer"), choice(text="", finish_reason="stop"), USAGE]
    chunks = read_all(TEXT.reader(request()), *events)
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert TOKENIZER.detokenizer().feed(ids) == "größer"
    assert ids[-1] == TOKENIZER.end_id
    assert (chunks[-1].finish, chunks[-1].cached_tokens) == ("stop", 2)
    cut = read_all(TEXT.reader(request()), choice(text="water", finish_reason="length"))
    assert TOKENIZER.end_id not in cut[0].token_ids


def test_halves_of_a_character_in_two_events() -> None:
    reader = TEXT.reader(request())
    halves = [b'{"choices": [{"text": "a\\ud83d"}]}', b'{"choices": [{"text": "\\ude00", "finish_reason": "length"}]}']
    chunks = [chunk for half in halves if (chunk := reader.read(half)) is not None]
    ids = [token for chunk in [*chunks, reader.last()] for token in chunk.token_ids]
    assert TOKENIZER.detokenizer().feed(ids) == "a😀"


def test_the_text_route_refuses_what_it_cannot_do() -> None:
    for impossible in (request(logprobs=0), request(prompt_logprobs=True), request(lark="x")):
        with pytest.raises(EngineRefused) as caught:
            TEXT.body(impossible)
        assert (caught.value.fault.code, caught.value.fault.retryable) == ("unsupported", False)


def test_strict_servers_get_only_fields_of_openai() -> None:
    known = {"model", "prompt", "max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stream"}
    assert TEXT.body(request()).keys() == known
    assert TEXT.body(request(seed=None)).keys() == known - {"seed"}
    more = TEXT.body(request(sampling=Sampling(top_k=3, min_p=0.1, repetition_penalty=1.2), min_tokens=2, ignore_eos=True, stop_ids=(4,)))
    assert more.keys() - known == {"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "no", "code": 400}}, "no"),
        ({"error": "no"}, "no"),
        ({"detail": "no"}, "no"),
        ({"object": "error", "message": "no"}, "no"),
        ({"detail": [{"msg": "x"}]}, '[{"msg": "x"}]'),
        ("no", "no"),
    ],
)
def test_errors_have_many_shapes(body: object, message: str) -> None:
    assert message_in(body) == message


# Images.

NAME = bytes(range(16))
IMAGES = PromptImages((5, 9, 7), [EngineImage(NAME, (1, 1), b"rgb")])


def test_images_are_content_parts_for_vllm_and_image_data_for_sglang() -> None:
    part = {"type": "image_url", "url": "data:x", "uuid": image_uuid(NAME)}
    assert VLLM.image_fields(IMAGES, ["data:x"]) == {"token_ids": (5, 9, 7), "content_parts": [part], "return_token_ids": True}
    sglang_fields = SglangDialect(ALL_ON).image_fields(IMAGES, ["data:x"])
    assert sglang_fields == {"input_ids": [5, 9, 7], "image_data": ["data:x"]}


@pytest.mark.parametrize("dialect", [COMPLETIONS, TEXT], ids=["completions", "text"])
def test_other_routes_take_no_images(dialect: Dialect) -> None:
    assert not dialect.reads_images
    with pytest.raises(EngineRefused) as refused:
        dialect.image_fields(IMAGES, ["data:x"])
    assert refused.value.fault.code == "unsupported"


def test_what_vllm_makes_of_a_prompt_with_images_is_checked_once() -> None:
    first = {"choices": [{"token_ids": [1]}], "prompt_token_ids": [5, 6, 7]}
    last = {"choices": [{"token_ids": [2], "finish_reason": "length"}]}
    assert read_all(VLLM.reader(request(images=IMAGES)), first, last) == [Chunk((1,)), Chunk((2,), finish="length")]
    assert fault_of(VLLM.reader(request(images=IMAGES)), first | {"prompt_token_ids": [5, 6, 6, 7]}).code == "image_mismatch"
    assert fault_of(VLLM.reader(request(images=IMAGES)), last).code == "image_mismatch", "a server that does not tell"
