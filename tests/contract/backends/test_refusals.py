"""What can never run is refused, by name, before the engine sees it: a single bad id would be the end of some."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from chat_model import VOCABULARY
from contract.backends.rig import GREEDY, Generation, Rig
from contract.backends.setups import CONTEXT_LENGTH, KV_TOKENS


def _refused(rig: Rig, prompt: tuple[int, ...], max_tokens: int = 8, **fields: Any) -> Generation:
    """Alone beside one that runs, which is exact, as is one that comes after."""

    async def refuse() -> Generation:
        other = rig.begin(rig.request(rig.prompt("beside a refused one", 30), 30))
        await rig.has_made(other, 1)
        (refused,) = await rig.finish([rig.request(prompt, max_tokens, **fields)])
        await rig.ended(other)
        (after,) = await rig.finish([rig.request(rig.prompt("after a refused one", 20), 5)])
        rig.check_exact(other, after)
        return refused

    refused = rig.run(refuse())
    assert not refused.fault.retryable
    return refused


@pytest.mark.parametrize("token", [-1, -(2**31), VOCABULARY, VOCABULARY + 1, 2**31 - 1, 2**31, 2**32, 2**63 - 1])
@pytest.mark.parametrize("place", ["prompt", "stop_ids", "logit_bias"])
def test_ids_that_the_model_does_not_have(rig: Rig, token: int, place: str) -> None:
    prompt = rig.prompt("bad ids", 20)
    fields: dict[str, Any] = {}
    match place:
        case "prompt":
            prompt = (*prompt[:7], token, *prompt[7:])
        case "stop_ids":
            fields["stop_ids"] = (5, token)
        case "logit_bias":
            fields["logit_bias"] = ((5, 1.0), (token, 1.0))
    fault = _refused(rig, prompt, **fields).fault
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
    assert _refused(rig, ()).fault.code == "empty_prompt"


@pytest.mark.parametrize(("too_long", "max_tokens"), [(1, 8), (1, 1), (5000, 8), (1, 1500)])
def test_what_does_not_fit_the_context(rig: Rig, too_long: int, max_tokens: int) -> None:
    length = rig.model.context_length + too_long - max_tokens
    fault = _refused(rig, rig.prompt("too long", length), max_tokens).fault
    assert fault.code == "context_length_exceeded"
    assert f"{length + max_tokens:,}" in fault.message
    assert f"{rig.model.context_length:,}" in fault.message


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


@pytest.mark.parametrize("offset", [-1, 21, 2**40])
def test_an_offset_that_cannot_be(rig: Rig, offset: int) -> None:
    assert _refused(rig, rig.prompt("bad offset", 20), 2**41, offset=offset).fault.code == "invalid_offset"


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.5},
        {"presence_penalty": 1e6},
        {"frequency_penalty": float("nan")},
        {"repetition_penalty": 0.0},
    ],
    ids=str,
)
def test_what_cannot_be_sampled_by(rig: Rig, sampling: dict[str, float]) -> None:
    fault = _refused(rig, rig.prompt("bad sampling", 20), sampling=replace(GREEDY, **sampling)).fault
    assert fault.code == "invalid_sampling"
    assert next(iter(sampling)) in fault.message


def test_more_kv_than_there_is(rig: Rig) -> None:
    """Refused at once, where it can happen at all: waiting for room would be waiting for ever."""
    if rig.lacks("kv_too_small"):
        assert rig.model.context_length <= rig.backend.stats().kv_blocks_total * rig.model.block_size
        return
    with Rig(rig.setup, "--kv-blocks", "64") as small:
        size = 64 * small.model.block_size
        fault = _refused(small, small.prompt("too much KV", size), 1).fault
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
