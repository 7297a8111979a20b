"""What can never run is refused, by name, before the engine sees it: a single bad id would be the end of some."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from chat_model import VOCABULARY
from contract.backends.rig import GREEDY, Generation, Rig
from contract.backends.setups import CONTEXT_LENGTH, KV_TOKENS
from penstock.wire.messages import Fault, Submit


def _refused(rig: Rig, *requests: Submit) -> list[Fault]:
    """Why each of them is, beside one that runs, which is exact, as is one that comes after."""

    async def refuse() -> list[Generation]:
        other = rig.begin(rig.request(rig.prompt("beside a refused one", 30), 30))
        await rig.has_made(other, 1)
        refused = await rig.finish(requests)
        await rig.ended(other)
        (after,) = await rig.finish([rig.request(rig.prompt("after a refused one", 20), 5)])
        rig.check_exact(other, after)
        return refused

    faults = [generation.fault for generation in rig.run(refuse())]
    assert not any(fault.retryable for fault in faults)
    return faults


@pytest.mark.parametrize("place", ["prompt", "stop_ids", "logit_bias"])
def test_ids_that_the_model_does_not_have(rig: Rig, place: str) -> None:
    prompt = rig.prompt("bad ids", 20)
    tokens = [-1, -(2**31), VOCABULARY, VOCABULARY + 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1]
    match place:
        case "prompt":
            requests = [rig.request((*prompt[:7], token, *prompt[7:])) for token in tokens]
        case "stop_ids":
            requests = [rig.request(prompt, stop_ids=(5, token)) for token in tokens]
        case _:
            requests = [rig.request(prompt, logit_bias=((5, 1.0), (token, 1.0))) for token in tokens]
    for token, fault in zip(tokens, _refused(rig, *requests), strict=True):
        assert fault.code == "invalid_token"
        assert str(token) in fault.message
        assert f"0 to {VOCABULARY - 1}" in fault.message


@pytest.mark.parametrize("token", [0, 2, VOCABULARY - 1])
def test_the_first_and_the_last_id_are_the_models(rig: Rig, token: int) -> None:
    generation = rig.say((token, *rig.prompt("the ends of the vocabulary", 10), token), 8, stop_ids=(token,), logit_bias=((token, 0.0),))
    assert generation.terminal is not None
    assert generation.tokens
    rig.check_exact(generation)


def test_an_empty_prompt(rig: Rig) -> None:
    (fault,) = _refused(rig, rig.request(()))
    assert fault.code == "empty_prompt"


def test_what_does_not_fit_the_context(rig: Rig) -> None:
    most = rig.model.context_length
    sizes = [(most - 7, 8), (most, 1), (most + 5000, 8), (most - 1499, 1500), (10, 2**40)]
    requests = [rig.request(rig.prompt("too long", length), max_tokens) for length, max_tokens in sizes]
    for (length, max_tokens), fault in zip(sizes, _refused(rig, *requests), strict=True):
        assert fault.code == "context_length_exceeded"
        assert f"maximum context length is {most} tokens. However, you requested {length + max_tokens} tokens" in fault.message


def test_the_context_is_as_long_as_was_asked_for(rig: Rig) -> None:
    if rig.lacks("the whole context"):
        assert CONTEXT_LENGTH - 8 <= rig.model.context_length < CONTEXT_LENGTH
    else:
        assert rig.model.context_length == CONTEXT_LENGTH


def test_a_context_is_not_counted_twice_when_it_goes_on(rig: Rig) -> None:
    """What was made elsewhere is in the prompt, and in `max_tokens`."""
    prompt = rig.prompt("just fits", rig.model.context_length - 20)
    whole = rig.say(prompt, 20)
    rest = rig.say((*prompt, *whole.tokens[:12]), 20, seed=whole.request.seed, offset=12)
    rest.check("length", 8)
    assert rest.tokens == whole.tokens[12:]


def test_an_offset_that_cannot_be(rig: Rig) -> None:
    requests = [rig.request(rig.prompt("bad offset", 20), 2**41, offset=offset) for offset in (-1, 21, 2**40)]
    assert [fault.code for fault in _refused(rig, *requests)] == ["invalid_offset"] * 3


def test_what_cannot_be_sampled_by(rig: Rig) -> None:
    cases: list[dict[str, float]] = [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.5},
        {"presence_penalty": 1e6},
        {"frequency_penalty": math.nan},
        {"repetition_penalty": 0.0},
    ]
    requests = [rig.request(rig.prompt("bad sampling", 20), sampling=replace(GREEDY, **case)) for case in cases]
    for case, fault in zip(cases, _refused(rig, *requests), strict=True):
        assert fault.code == "invalid_sampling"
        assert next(iter(case)) in fault.message


def test_more_kv_than_there_is(rig: Rig) -> None:
    """Refused at once, where it can happen at all: waiting for room would be waiting for ever."""
    if rig.lacks("kv_too_small"):
        assert rig.model.context_length <= rig.backend.stats().kv_blocks_total * rig.model.block_size
        return
    with Rig(rig.setup, "--kv-blocks", "64") as small:
        size = 64 * small.model.block_size
        (fault,) = _refused(small, small.request(small.prompt("too much KV", size), 1))
        assert fault.code == "kv_too_small"
        assert "64" in fault.message
        fits = small.say(small.prompt("just enough KV", size - 10), 10)
        fits.check()
        small.check_exact(fits)
        small.check_settled()


def test_all_of_the_kv_can_be_used(rig: Rig) -> None:
    """By several together, that need more than there is: they wait for each other, or make room."""
    count = KV_TOKENS // rig.model.context_length + 1
    requests = [rig.request(rig.prompt(f"much KV {number}", rig.model.context_length - 60), 60) for number in range(count)]
    generations = rig.run(rig.finish(requests))
    for generation in generations:
        generation.check()
    rig.check_exact(*generations)
