"""What the guide to engines promises of an answer that changes its worker, for each type and device that a CPU can show.

`test_reproducible.py` has the promise of `--reproducible`; the simulator's is tested with the cluster.
"""

from __future__ import annotations

import pytest
import torch

from penstock.engine.model import Model
from penstock.wire.messages import Finish, Sampling, Submit, TokenLogprob
from tiny_models import GREEDY, Collected, generation_id, make_engine, make_model, make_submit, random_prompt, reference, run

TOKENS = 40
SAMPLED = Sampling(temperature=0.9, top_p=0.95)


def model_of(dtype: torch.dtype) -> Model:
    shape = make_model("llama").shape
    return Model(shape, reference("llama").state_dict().items(), 512, dtype, torch.device("cpu"))


def answers(collected: Collected, number: int) -> list[tuple[int, TokenLogprob]]:
    deltas = collected.deltas[generation_id(number)]
    return [pair for delta in deltas for pair in zip(delta.token_ids, delta.logprobs or (), strict=True)]


def moved(dtype: torch.dtype, sampling: Sampling) -> list[tuple[list[tuple[int, TokenLogprob]], list[tuple[int, TokenLogprob]]]]:
    """Of several answers, what follows a change of worker: as it was without the change, and on the new worker, beside others."""
    whole = [
        make_submit(number, random_prompt(number, 20 + number), TOKENS, seed=number, sampling=sampling, logprobs=0) for number in range(12)
    ]
    model = model_of(dtype)
    first = run(make_engine(model, kv_pages=256), whole)
    resumed: list[Submit] = []
    for number, request in enumerate(whole):
        offset = 1 + 3 * number
        known = tuple(token for token, _ in answers(first, number)[:offset])
        fields = {"seed": number, "sampling": sampling, "logprobs": 0, "offset": offset}
        resumed.append(make_submit(number, [*request.token_ids, *known], TOKENS, **fields))
    second = run(make_engine(model, kv_pages=256, token_budget=48), resumed)
    assert set(second.terminals.values()) == {Finish("length")}
    for request in resumed:
        assert second.deltas[request.id][0].offset == request.offset
        assert request.offset + len(second.tokens[request.id]) == TOKENS
    return [(answers(first, number)[request.offset :], answers(second, number)) for number, request in enumerate(resumed)]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_in_float32_the_tokens_are_the_same(sampling: Sampling) -> None:
    for before, after in moved(torch.float32, sampling):
        assert [token for token, _ in after] == [token for token, _ in before]
        for (_, one), (_, other) in zip(before, after, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_in_bfloat16_the_answer_goes_on_and_its_probabilities_are_about_the_same(sampling: Sampling) -> None:
    """Tokens may differ from the first near-tie on. Up to there, what the model says is the same but for rounding."""
    for before, after in moved(torch.bfloat16, sampling):
        for (token, one), (other_token, other) in zip(before, after, strict=True):
            if token != other_token:
                break
            assert one.logprob == pytest.approx(other.logprob, abs=0.5)
