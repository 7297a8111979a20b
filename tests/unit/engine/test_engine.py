"""The engine's tokens are those of transformers, however they come about."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.wire.codec import unpack_logprobs
from penstock.wire.messages import Fault, Finish, Sampling, Submit
from tiny_models import (
    CONTEXT,
    VOCABULARY,
    Collected,
    generate,
    generate_all,
    generation_id,
    make_engine,
    make_model,
    make_reference,
    make_submit,
    random_prompt,
    reference,
    reference_tokens,
    run,
)

FAMILIES = ("llama", "qwen3")
TOKENS = 64
PROMPTS = [random_prompt(number, 5 + number * 9) for number in range(16)]
# Some that share a prefix with another, of whole pages and not.
PROMPTS += [[*prompt[: len(prompt) // 2], 7, 8, 9] for prompt in PROMPTS] + [PROMPTS[15], PROMPTS[15][:64], PROMPTS[15][:65]]


@pytest.fixture(scope="module", params=FAMILIES)
def expected(request: pytest.FixtureRequest) -> tuple[str, list[list[int]]]:
    return request.param, generate_all(reference(request.param), PROMPTS, TOKENS)


@pytest.mark.parametrize(
    ("settings", "is_short"),
    [
        ({"max_batch": 1, "kv_pages": 256, "token_budget": 512}, False),  # alone
        ({"kv_pages": 512, "token_budget": 512}, False),  # all in one batch, prefixes shared
        ({"kv_pages": 512, "token_budget": 20}, False),  # prompts in small pieces
        ({"kv_pages": 40}, True),  # preempted
        ({"kv_pages": 20, "token_budget": 16, "max_batch": 5, "page_size": 16}, True),
        ({"kv_pages": 90, "token_budget": 48, "page_size": 4}, True),
    ],
)
def test_tokens_are_those_of_transformers(expected: tuple[str, list[list[int]]], settings: dict[str, Any], is_short: bool) -> None:
    family, tokens = expected
    engine = make_engine(family, **settings)
    collected = run(engine, [make_submit(number, prompt, TOKENS) for number, prompt in enumerate(PROMPTS)])
    assert [collected.tokens[generation_id(number)] for number in range(len(PROMPTS))] == tokens
    assert all(terminal == Finish("length") for terminal in collected.terminals.values())
    assert bool(engine.stats().preemptions) == is_short


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
@pytest.mark.parametrize("settings", [{"kv_pages": 512, "token_budget": 512}, {"kv_pages": 40, "token_budget": 20}], ids=["batch", "short"])
def test_biases_and_sliding_windows(family: str, settings: dict[str, Any]) -> None:
    prompts = PROMPTS[:16:3]
    collected = run(make_engine(family, **settings), [make_submit(number, prompt, TOKENS) for number, prompt in enumerate(prompts)])
    expected = generate_all(reference(family), prompts, TOKENS)
    assert [collected.tokens[generation_id(number)] for number in range(len(prompts))] == expected


def test_positions_beyond_the_trained_length() -> None:
    """Twice as long: transformers is told the YaRN factor, the engine only the length."""
    stretched = make_reference(
        "llama", rope_parameters={"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": CONTEXT}
    )
    prompt = random_prompt(8, CONTEXT + 100)
    engine = make_engine(make_model("llama", 2 * CONTEXT), context_length=2 * CONTEXT, kv_pages=80)
    collected = run(engine, [make_submit(0, prompt, 30)])
    assert collected.tokens[generation_id(0)] == generate(stretched, prompt, 30)


def test_what_was_computed_is_reused() -> None:
    engine = make_engine(kv_pages=256)
    prompt = random_prompt(1, 100)
    first = run(engine, [make_submit(0, prompt, 20)])
    assert _cached(first, 0) == 0
    longer = [*prompt, *first.tokens[generation_id(0)], 1, 2, 3]
    second = run(engine, [make_submit(1, longer, 20)])
    assert _cached(second, 1) == 112, "seven pages: all but the last, which was not full"
    assert second.tokens[generation_id(1)] == reference_tokens("llama", longer, 20)


def test_siblings_compute_their_prompt_once() -> None:
    engine = make_engine(kv_pages=256, token_budget=512)
    prompt = random_prompt(2, 200)
    collected = run(engine, [make_submit(number, prompt, 8) for number in range(8)])
    assert sorted(_cached(collected, number) for number in range(8)) == [0] + [192] * 7


def test_a_resumed_generation_goes_on_with_the_same_tokens() -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, frequency_penalty=0.5, repetition_penalty=1.1)
    prompt = random_prompt(3, 40)
    whole = run(make_engine(), [make_submit(0, prompt, 40, seed=11, sampling=sampling)]).tokens[generation_id(0)]
    for offset in (1, 17, 39):
        resumed = make_submit(1, [*prompt, *whole[:offset]], 40, seed=11, sampling=sampling, offset=offset)
        collected = run(make_engine(), [resumed])
        assert collected.deltas[generation_id(1)][0].offset == offset
        assert collected.tokens[generation_id(1)] == whole[offset:]


def test_one_that_was_complete_elsewhere_only_ends() -> None:
    collected = run(make_engine(), [make_submit(0, [1, 2, 3, 4], 2, offset=2)])
    assert collected.tokens[generation_id(0)] == []
    assert collected.terminals[generation_id(0)] == Finish("length")


SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=20),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.05, presence_penalty=0.4),
]
SAMPLED = [make_submit(number, random_prompt(number, 10 + number), 24, seed=number, sampling=SAMPLINGS[number % 4]) for number in range(64)]


@pytest.fixture(scope="module")
def sampled_alone() -> dict[bytes, list[int]]:
    return {request.id: run(make_engine(max_batch=1), [request]).tokens[request.id] for request in SAMPLED}


@pytest.mark.parametrize(
    "settings",
    [{"kv_pages": 512, "token_budget": 512}, {"kv_pages": 512, "token_budget": 24}, {"kv_pages": 48}],
    ids=["batch", "pieces", "preempted"],
)
def test_sampled_tokens_do_not_depend_on_the_company(sampled_alone: dict[bytes, list[int]], settings: dict[str, Any]) -> None:
    """The same requests alone and 64 at a time."""
    assert run(make_engine(**settings), SAMPLED).tokens == sampled_alone


def test_stop_ids_end_ids_and_their_limits() -> None:
    prompt = random_prompt(5, 30)
    tokens = reference_tokens("llama", prompt, 40)
    end = tokens[9]
    first = tokens.index(end)
    finished = run(make_engine(end_ids=[end]), [make_submit(0, prompt, 40)])
    assert finished.tokens[generation_id(0)] == tokens[: first + 1]
    assert finished.terminals[generation_id(0)] == Finish("stop")
    stopped = run(make_engine(), [make_submit(0, prompt, 40, stop_ids=(end,))])
    assert stopped.tokens[generation_id(0)] == tokens[: first + 1]
    ignoring = run(make_engine(end_ids=[end]), [make_submit(0, prompt, 40, ignore_eos=True)])
    assert ignoring.tokens[generation_id(0)] == tokens
    at_least = run(make_engine(end_ids=[end]), [make_submit(0, prompt, 40, min_tokens=20)])
    assert end not in at_least.tokens[generation_id(0)][:20]
    assert len(at_least.tokens[generation_id(0)]) >= 20


def test_logprobs_of_answer_and_prompt() -> None:
    prompt = random_prompt(6, 50)
    run(engine := make_engine(token_budget=16), [make_submit(9, prompt, 1)])  # its KV is cached, and must not be used: it has no logits
    collected = run(engine, [make_submit(0, prompt, 8, logprobs=3, prompt_logprobs=True)])
    tokens = collected.tokens[generation_id(0)]
    with torch.inference_mode():
        expected = reference("llama")(torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)
    deltas = collected.deltas[generation_id(0)]
    report = deltas[0].prompt
    assert report is not None
    assert report.logprobs is not None
    of_prompt = [entry for piece in report.logprobs for entry in unpack_logprobs(piece)]
    assert of_prompt[0] is None
    entries = [*of_prompt[1:], *(entry for delta in deltas for entry in delta.logprobs or ())]
    assert len(entries) == len(prompt) + len(tokens) - 1
    for position, (entry, token) in enumerate(zip(entries, [*prompt, *tokens][1:], strict=True)):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(expected[position, token]), abs=1e-4)
        top = expected[position].topk(3)
        assert [token for token, _ in entry.top] == top.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)


def test_only_the_prompt() -> None:
    collected = run(make_engine(), [make_submit(0, random_prompt(1, 20), 0, logprobs=1, prompt_logprobs=True)])
    (delta,) = collected.deltas[generation_id(0)]
    assert delta.token_ids == ()
    assert delta.prompt is not None
    assert delta.prompt.logprobs is not None
    assert sum(map(len, map(unpack_logprobs, delta.prompt.logprobs))) == 20
    assert collected.terminals[generation_id(0)] == Finish("length")


@pytest.mark.parametrize(
    ("request_", "code", "names"),
    [
        (make_submit(0, [1] * 400, 100), "kv_too_small", "needs 32 KV pages and the worker has 20"),
        (make_submit(0, [1] * 500, 100), "context_length_exceeded", "600 tokens"),
        (make_submit(0, [1, VOCABULARY], 10), "invalid_token", f"token id {VOCABULARY}"),
        (make_submit(0, [1, -1], 10), "invalid_token", "token id -1"),
        (make_submit(0, [], 10), "empty_prompt", "at least one"),
        (make_submit(0, [1], 10, logit_bias=((VOCABULARY, 1.0),)), "invalid_token", f"token id {VOCABULARY}"),
    ],
)
def test_what_can_never_run_is_refused_at_once(request_: Submit, code: str, names: str) -> None:
    engine = make_engine(kv_pages=20)
    other = make_submit(1, random_prompt(1, 20), 5)
    engine.submit(request_)
    collected = run(engine, [other])
    terminal = collected.terminals[request_.id]
    assert isinstance(terminal, Fault)
    assert terminal.code == code
    assert names in terminal.message
    assert not terminal.retryable
    assert collected.tokens[other.id] == reference_tokens("llama", other.token_ids, 5), "nobody else is hurt"


def test_abort_in_every_state_frees_everything() -> None:
    engine = make_engine(kv_pages=24, token_budget=32, max_batch=3)
    collected = Collected()
    for number in range(5):
        engine.submit(make_submit(number, random_prompt(number, 90), 60))
    engine.cancel(generation_id(4))  # not begun
    collected.step(engine)
    engine.cancel(generation_id(0))  # in the middle of its prompt
    engine.check_integrity()
    while generation_id(1) not in collected.tokens:
        collected.step(engine)
    engine.cancel(generation_id(1))  # in the middle of its answer
    engine.check_integrity()
    engine.cancel(generation_id(1))  # again
    engine.cancel(b"nobody" * 2)
    while engine.has_work:
        collected.step(engine)
    assert collected.terminals.keys() == {generation_id(2), generation_id(3)}
    assert engine.stats().kv_blocks_used == 0
    for number in (2, 3):
        assert collected.tokens[generation_id(number)] == reference_tokens("llama", random_prompt(number, 90), 60)


def test_a_preempted_one_can_be_aborted() -> None:
    engine = make_engine(kv_pages=20)
    for number in range(4):
        engine.submit(make_submit(number, random_prompt(number, 70), 60))
    collected = Collected()
    while not engine.stats().preemptions:
        collected.step(engine)
    for number in range(4):
        engine.cancel(generation_id(number))
        engine.check_integrity()
    assert not engine.has_work
    assert engine.stats().kv_blocks_used == 0


def test_those_that_generate_get_a_token_in_every_step() -> None:
    """A long prompt comes in pieces beside them."""
    engine = make_engine(kv_pages=128, token_budget=32)
    for number in range(4):
        engine.submit(make_submit(number, random_prompt(number, 4), 40))
    engine.step()
    engine.submit(make_submit(9, random_prompt(9, 300), 4))
    steps = 0
    while True:
        segments = engine.step()
        if any(segment.id == generation_id(9) for segment in segments):
            break
        steps += 1
        assert len(segments) == 4
    assert steps >= 300 // 32


def _cached(collected: Collected, number: int) -> int:
    report = collected.deltas[generation_id(number)][0].prompt
    assert report is not None
    return report.cached_tokens


def test_prompts_get_on_beside_more_that_generate_than_the_budget() -> None:
    engine = make_engine(kv_pages=256, token_budget=8)
    for number in range(12):
        engine.submit(make_submit(number, random_prompt(number, 4), 200))
    for _ in range(20):
        engine.step()
    engine.submit(make_submit(99, random_prompt(99, 60), 2))
    collected = Collected()
    for _ in range(30):
        collected.step(engine)
    assert generation_id(99) in collected.terminals


def test_prompt_logprobs_survive_a_preemption() -> None:
    engine = make_engine(page_size=4, kv_pages=67, token_budget=8)
    older = make_submit(0, random_prompt(0, 140), 60)
    asked = make_submit(1, random_prompt(1, 120), 4, logprobs=1, prompt_logprobs=True)
    engine.submit(older)
    collected = Collected()
    while older.id not in collected.tokens:
        collected.step(engine)
    engine.submit(asked)
    while engine.has_work:
        collected.step(engine)
    assert engine.stats().preemptions, "in the middle of its prompt"
    report = collected.deltas[asked.id][0].prompt
    assert report is not None
    assert report.logprobs is not None
    assert sum(map(len, map(unpack_logprobs, report.logprobs))) == 120
    assert collected.tokens[older.id] == reference_tokens("llama", older.token_ids, 60)


@pytest.mark.parametrize(
    ("sampling", "names"),
    [
        (Sampling(temperature=float("inf")), "temperature"),
        (Sampling(temperature=-1), "temperature"),
        (Sampling(top_k=-1), "top_k"),
        (Sampling(top_p=0), "top_p"),
        (Sampling(min_p=2), "min_p"),
        (Sampling(repetition_penalty=1e-300), "repetition_penalty"),
        (Sampling(frequency_penalty=float("nan")), "frequency_penalty"),
    ],
)
def test_what_cannot_be_sampled_by_is_refused(sampling: Sampling, names: str) -> None:
    terminal = run(make_engine(), [make_submit(0, [1, 2], 4, sampling=sampling)]).terminals[generation_id(0)]
    assert isinstance(terminal, Fault)
    assert (terminal.code, f"`{names}` is" in terminal.message) == ("invalid_sampling", True)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=1e-46), Sampling(top_k=2**63), Sampling(top_p=1e-9), Sampling(temperature=1e-40, min_p=1.0)],
    ids=["cold", "top_k", "top_p", "min_p"],
)
def test_extreme_settings_that_leave_the_likeliest(sampling: Sampling) -> None:
    collected = run(make_engine(), [make_submit(0, [1, 2], 8, sampling=sampling)])
    assert collected.terminals[generation_id(0)] == Finish("length")
    if sampling.top_k == 0:
        assert collected.tokens[generation_id(0)] == reference_tokens("llama", [1, 2], 8)


@pytest.mark.parametrize("max_tokens", [0, 10])
def test_scores_that_are_not_numbers_end_one_generation_and_hurt_no_other(max_tokens: int) -> None:
    engine = make_engine(kv_pages=16)
    model = make_model("llama")
    damaged, healthy = random_prompt(1, 30), random_prompt(2, 40)
    damaged[3] = 299
    healthy = [token for token in healthy if token != 299]
    embedding, model._embedding = model._embedding, model._embedding.clone()
    try:
        model._embedding[299] = torch.nan
        collected = run(engine, [make_submit(0, damaged, max_tokens), make_submit(1, healthy, 10)])
    finally:
        model._embedding = embedding
    fault = collected.terminals[generation_id(0)]
    assert isinstance(fault, Fault), "also where only the prompt is wanted"
    assert fault.code == "invalid_logits"
    assert collected.tokens[generation_id(1)] == reference_tokens("llama", healthy, 10)
    later = [make_submit(number, random_prompt(number, 100), 20) for number in range(3, 8)]
    collected = run(engine, later)
    for request in later:
        assert collected.tokens[request.id] == reference_tokens("llama", request.token_ids, 20), "the damage is left in no page"
