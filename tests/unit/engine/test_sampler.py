"""From logits to tokens: what may be drawn, exactly, and how often, within a chi-square bound. All seeds are fixed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine import sampler
from penstock.engine.sampler import CANDIDATES, SUM_WIDTH, Sampled, Sampler, prompt_logprobs, uniform
from penstock.engine.sequence import SampledSequence as Generation
from penstock.wire.messages import Sampling, Submit

GREEDY = Sampling(temperature=0)

# As in `tiny_models`: threads that wait for each other lose much where others work beside.
torch.set_num_threads(1)


def one(seed: int = 0, sampling: Sampling = GREEDY, prompt: Sequence[int] = (0,), **fields: Any) -> Generation:
    """A generation that has started."""
    generation = Generation(Submit(bytes(16), tuple(prompt), 1000, seed, sampling=sampling, **fields))
    generation.tokens = list(prompt)
    return generation


def sample(logits: Tensor, rows: Sequence[Generation], end_ids: Iterable[int] = ()) -> Sampled:
    """The sampler may change what it is given."""
    return Sampler(frozenset(end_ids)).sample(logits.clone(), rows)


def draw(logits: Tensor, sampling: Sampling, count: int, **fields: Any) -> list[int]:
    """From the same logits with `count` seeds."""
    return sample(logits.expand(count, -1), [one(seed, sampling, **fields) for seed in range(count)]).tokens


def assert_distributed(tokens: Sequence[int], probabilities: Tensor) -> None:
    """Pearson's chi-square over what is expected at least five times; its 1 - 1e-6 quantile by Wilson and Hilferty.

    What has no probability must not come at all.
    """
    counts, expected = Counter(tokens), (probabilities.double() * len(tokens)).tolist()
    assert all(expected[token] > 0 for token in counts), "a token without probability"
    common = [token for token, wanted in enumerate(expected) if wanted >= 5]
    pairs = [(counts[token], expected[token]) for token in common]
    pairs.append((len(tokens) - sum(seen for seen, _ in pairs), len(tokens) - sum(wanted for _, wanted in pairs)))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs if wanted > 1e-6)
    freedom = max(1, len(common) - 1)
    bound = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound, f"chi-square is {statistic:.1f}, over {bound:.1f}"


def kept_by(logits: Tensor, sampling: Sampling) -> list[int]:
    """In plain Python, of one row: the ids that may be drawn, the likeliest first."""
    highest = float(logits.max())
    weights = [math.exp((float(logit) - highest) / sampling.temperature) for logit in logits]
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    order = [token for token in order if weights[token] >= sampling.min_p]
    if sampling.top_k:
        order = order[: sampling.top_k]
    before = accumulate((weights[token] for token in order), initial=0.0)
    needed = sampling.top_p * sum(weights[token] for token in order)
    return [token for token, mass in zip(order, before, strict=False) if mass < needed]


def distinct_logits(size: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


# What is drawn, and how often.


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000])
def test_greedy_takes_the_likeliest_and_the_first_of_equals(size: int) -> None:
    logits = torch.stack([distinct_logits(size, seed) for seed in range(20)])
    assert sample(logits, [one(seed) for seed in range(20)]).tokens == logits.argmax(-1).tolist()
    assert sample(torch.zeros(1, size), [one()]).tokens == [0]


def test_greedy_ignores_what_only_drawing_looks_at() -> None:
    logits = distinct_logits(300)
    assert set(draw(logits, Sampling(temperature=0, top_k=5, top_p=0.3, min_p=0.5), 20)) == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("size", [3, 10, 300])
def test_tokens_come_as_often_as_softmax_says(size: int, temperature: float) -> None:
    logits = distinct_logits(size, spread=1.0)
    assert_distributed(draw(logits, Sampling(temperature=temperature), 8000), (logits / temperature).softmax(-1))


def test_positions_are_as_good_as_seeds() -> None:
    logits = distinct_logits(10, spread=1.0)
    rows = [one(7, Sampling(), prompt=[0] * (offset + 1), offset=offset) for offset in range(2000)]
    assert_distributed(sample(logits.expand(2000, -1), rows).tokens, logits.softmax(-1))


def test_the_running_sum_is_in_the_order_of_the_ids() -> None:
    """By which a token is a function of the logits and of (seed, position) alone: the reference needs no torch."""
    logits = distinct_logits(1000, spread=2.0)
    probabilities = logits.double().softmax(-1).tolist()
    for seed, token in enumerate(draw(logits, Sampling(), 500)):
        before, number = sum(probabilities[:token]), uniform(seed, 0)
        assert before - 1e-5 <= number <= before + probabilities[token] + 1e-5


@pytest.mark.parametrize("size", [1, 2, SUM_WIDTH - 1, SUM_WIDTH, SUM_WIDTH + 1, 3 * SUM_WIDTH, 1000])
def test_all_of_the_mass_in_one_place(size: int) -> None:
    for place in {0, size // 2, size - 1}:
        for low in (-1e4, -math.inf):
            logits = torch.full((size,), low)
            logits[place] = 0
            assert set(draw(logits, Sampling(), 50)) == {place}


@pytest.mark.parametrize("size", [200, SUM_WIDTH, 700])
def test_no_number_falls_beside_the_weights(size: int) -> None:
    """The least and the greatest number, where the first and the last ids have no weight."""
    weights = torch.full((1, size), 0.1)
    weights[0, :7] = weights[0, -7:] = 0
    for number, place in ((0.5 / 2**32, 7), (1 - 0.5 / 2**32, size - 8)):
        assert sampler._where_passed(weights, torch.tensor([[number]], dtype=torch.float64)).tolist() == [place]


def test_a_number_on_a_border_is_of_what_comes_after_it() -> None:
    def place(number: float, weights: Tensor) -> int:
        return int(sampler._where_passed(weights[None], torch.tensor([[number]], dtype=torch.float64)))

    assert [place(number, torch.ones(4)) for number in (0.2, 0.25, 0.5, 0.75)] == [0, 1, 2, 3]
    assert [place(number, torch.ones(4 * SUM_WIDTH)) for number in (0.25, 0.5)] == [SUM_WIDTH, 2 * SUM_WIDTH]
    hollow = torch.ones(4 * SUM_WIDTH)
    hollow[: SUM_WIDTH + 3] = 0
    assert place(0.5 / 2**32, hollow) == SUM_WIDTH + 3


def test_rounding_does_not_lead_out_of_a_block() -> None:
    """A block's sum in float32 is more than its running sum in float64: what is wanted of it lies beyond its last weight."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(2000, 2 * SUM_WIDTH, generator=generator)
    weights[:, SUM_WIDTH - 5 : SUM_WIDTH] = 0
    sums = weights[:, :SUM_WIDTH].sum(-1).double()
    beyond = sums > weights[:, :SUM_WIDTH].double().sum(-1)
    assert beyond.any(), "nothing is rounded up, and so nothing tested"
    total = sums + weights[:, SUM_WIDTH:].sum(-1).double()
    numbers = (sums.nextafter(torch.zeros_like(sums)) / total)[:, None]
    places = sampler._where_passed(weights, numbers).squeeze(-1)
    assert bool((weights.gather(-1, places[:, None]) > 0).all())


# What is left to draw from.


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_k=1),
        Sampling(top_k=7),
        Sampling(top_k=300),
        Sampling(top_k=10_000),
        Sampling(top_p=1e-30),
        Sampling(top_p=0.5),
        Sampling(top_p=0.9),
        Sampling(min_p=0.1),
        Sampling(min_p=1.0),
        Sampling(temperature=2.0, min_p=0.1),
        Sampling(temperature=0.5, top_p=0.9),
        Sampling(top_k=20, top_p=0.7),
        Sampling(top_k=5, min_p=0.2),
        Sampling(top_p=0.8, min_p=0.1),
        Sampling(temperature=1.5, top_k=30, top_p=0.9, min_p=0.02),
    ],
    ids=str,
)
def test_exactly_the_likeliest_are_left(sampling: Sampling) -> None:
    logits = distinct_logits(300, 1)
    kept = kept_by(logits, sampling)
    probabilities = torch.zeros(300)
    probabilities[kept] = (logits[kept] / sampling.temperature).softmax(-1)
    tokens = draw(logits, sampling, 3000)
    assert_distributed(tokens, probabilities)
    likely = {token for token in kept if probabilities[token] > 0.01}
    assert likely <= set(tokens), "one that is left never comes"


@pytest.mark.parametrize("top_p", [0.3, 0.95])
def test_top_p_when_the_first_candidates_do_not_suffice(top_p: float) -> None:
    """A flat distribution: the smallest set is most of the vocabulary."""
    size = 4000
    logits = torch.linspace(0.1, 0, size)[torch.randperm(size, generator=torch.Generator().manual_seed(3))]
    sampling = Sampling(top_p=top_p)
    kept = set(kept_by(logits, sampling))
    assert len(kept) > 2 * CANDIDATES
    left = sampler._likeliest(logits.exp()[None], [sampling])[0]
    chosen = set(left.nonzero().flatten().tolist())
    assert len(chosen ^ kept) <= 1, "but for rounding at the border"
    assert torch.equal(left[sorted(chosen)], logits.exp()[sorted(chosen)]), "their weights are as they were"
    tokens = draw(logits, sampling, 1500)
    assert set(tokens) <= chosen
    assert len(set(tokens)) > CANDIDATES


def test_top_p_is_of_everything_though_only_candidates_are_looked_at() -> None:
    """Half of the mass is beyond the candidates: 0.3 of all of it is 0.6 of theirs."""
    size = 40 * CANDIDATES
    logits = torch.full((size,), -math.log(size - CANDIDATES))
    logits[:CANDIDATES] = -math.log(CANDIDATES) - torch.linspace(0, 1e-3, CANDIDATES)
    left = sampler._likeliest(logits.exp()[None], [Sampling(top_p=0.3)])[0]
    assert int((left > 0).sum()) == pytest.approx(0.6 * CANDIDATES, abs=2)


def test_top_k_beyond_the_candidates() -> None:
    logits = distinct_logits(3000, spread=0.1)
    left = sampler._likeliest(logits.exp()[None], [Sampling(top_k=700)])[0]
    assert set(left.nonzero().flatten().tolist()) == set(logits.topk(700).indices.tolist())


def test_rows_do_not_see_each_other() -> None:
    samplings = [
        GREEDY,
        Sampling(),
        Sampling(top_k=3),
        Sampling(top_k=900),
        Sampling(top_p=0.5),
        Sampling(top_p=0.99),
        Sampling(min_p=0.3),
        Sampling(temperature=0.3),
    ]
    logits = torch.stack([distinct_logits(2000, seed, 1.0) for seed in range(64)])
    rows = [one(seed, samplings[seed % len(samplings)]) for seed in range(64)]
    alone = [sample(logits[row : row + 1], [rows[row]]).tokens[0] for row in range(64)]
    assert sample(logits, rows).tokens == alone


# What is done to the logits before.


def penalised(logits: Sequence[float], prompt: Sequence[int], generated: Sequence[int], sampling: Sampling) -> list[float]:
    """In plain Python, by the definitions of OpenAI (presence, frequency) and of the CTRL paper (repetition)."""
    changed = list(logits)
    for token in {*prompt, *generated}:
        repetition = sampling.repetition_penalty
        changed[token] = changed[token] / repetition if changed[token] > 0 else changed[token] * repetition
    for token, count in Counter(generated).items():
        changed[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    return changed


PENALTIES = [
    Sampling(presence_penalty=1.5),
    Sampling(presence_penalty=-1.5),
    Sampling(frequency_penalty=0.7),
    Sampling(frequency_penalty=-2.0),
    Sampling(repetition_penalty=1.8),
    Sampling(repetition_penalty=0.5),
    Sampling(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.3),
]


@pytest.mark.parametrize("sampling", PENALTIES, ids=str)
@pytest.mark.parametrize("is_resumed", [False, True])
def test_penalties(sampling: Sampling, is_resumed: bool) -> None:
    prompt, generated = [1, 2, 3, 3, 3, 8], [2, 4, 4, 4, 5, 9, 9]
    logits = distinct_logits(20, 5)
    assert float(logits[prompt + generated].min()) < 0 < float(logits[prompt + generated].max())
    if is_resumed:
        sequence = one(0, sampling, [*prompt, *generated], offset=len(generated))
    else:
        sequence = one(0, sampling, prompt)
        for token in generated:
            sequence.append(token)
    row = logits.clone()
    sampler._adjust(row, sequence)
    assert row.tolist() == pytest.approx(penalised(logits.tolist(), prompt, generated, sampling), abs=1e-5)


def test_penalties_before_anything_is_generated() -> None:
    logits = distinct_logits(20, 5)
    row = logits.clone()
    sampler._adjust(row, one(0, Sampling(presence_penalty=1.0, frequency_penalty=1.0), [1, 2, 3]))
    assert torch.equal(row, logits), "the prompt does not count"


def test_logit_bias_is_added() -> None:
    logits = distinct_logits(300, 2, spread=1.0)
    bias = ((0, 1.5), (7, -2.0), (299, 0.5), (40, -100.0))
    changed = logits.clone()
    for token, value in bias:
        changed[token] += value
    assert_distributed(draw(logits, Sampling(), 4000, logit_bias=bias), changed.softmax(-1))
    assert set(draw(logits, GREEDY, 5, logit_bias=((123, 100.0),))) == {123}
    everywhere = tuple((token, -100.0) for token in range(300))
    assert set(draw(logits, GREEDY, 5, logit_bias=everywhere)) == {int(logits.argmax())}


def test_ends_and_stops_are_banned_while_too_short() -> None:
    logits = torch.tensor([9.0, 8.0, 7.0, 6.0])
    for sampling in (GREEDY, Sampling(temperature=0.01)):
        for made, expected in ((0, 2), (1, 2), (2, 0)):
            sequence = one(0, sampling, [3] * (1 + made), offset=made, min_tokens=2, stop_ids=(1,))
            assert sample(logits[None], [sequence], end_ids=[0]).tokens == [expected]


def test_only_the_row_that_is_too_short_is_restricted() -> None:
    logits = torch.tensor([9.0, 8.0, 7.0]).expand(2, -1)
    assert sample(logits, [one(min_tokens=1), one()], end_ids=[0]).tokens == [1, 0]


def test_a_grammar_restricts_after_the_bias() -> None:
    def restrict(logits: Tensor) -> None:
        logits[:, :9] = -math.inf

    rows = [one(0, GREEDY, logit_bias=((3, 100.0),)), one(1, Sampling(), logit_bias=((3, 100.0),))]
    assert Sampler(frozenset()).sample(torch.zeros(2, 10), rows, restrict).tokens == [9, 9]


# Logprobs.


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(temperature=0.5, top_k=3, frequency_penalty=2.0)], ids=str)
def test_logprobs_are_those_of_the_model_itself(sampling: Sampling) -> None:
    logits = torch.stack([distinct_logits(300, seed) for seed in range(6)])
    tops = [None, 0, 1, 5, 20, 10_000]
    rows = [one(seed, sampling, [1, 2, 3], offset=2, logprobs=top, logit_bias=((5, 50.0),)) for seed, top in enumerate(tops)]
    tokens, logprobs = sample(logits, rows)
    expected = logits.log_softmax(-1)
    assert logprobs[0] is None
    for row, top in enumerate(tops):
        entry = logprobs[row]
        if top is None or entry is None:
            assert (top, entry) == (None, None)
            continue
        assert entry.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        values, ids = expected[row].topk(min(top, 300))
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_of_a_prompt() -> None:
    logits = torch.stack([distinct_logits(50, seed) for seed in range(4)])
    expected = logits.log_softmax(-1)
    for top in (0, 2):
        entries = [entry for entry in prompt_logprobs(logits, [3, 4, 5, 6], top) if entry is not None]
        assert [entry.logprob for entry in entries] == pytest.approx([float(expected[row, 3 + row]) for row in range(4)], abs=1e-5)
        assert [[token for token, _ in entry.top] for entry in entries] == expected.topk(2).indices[:, :top].tolist()
    assert prompt_logprobs(logits[:0], [], 1) == []


def test_a_position_of_an_image_has_no_logprob() -> None:
    logits = torch.stack([distinct_logits(50, seed) for seed in range(3)])
    first, image, last = prompt_logprobs(logits, [3, 2**62 + 5, 6], 2)
    assert image is None
    assert [first, last] == prompt_logprobs(logits[[0, 2]], [3, 6], 2)


# The noise.


SEEDS = [0, 1, 2, -1, -(2**63), 2**63, 2**64 - 1, 2**80, 12345]


def test_noise_is_within_zero_and_one_and_a_function() -> None:
    for seed in SEEDS:
        for position in [0, 1, 1000, 2**20]:
            assert 0 < uniform(seed, position) < 1
            assert uniform(seed, position) * 2**32 % 1 == 0.5, "of 2**32 numbers the least is not zero and the greatest not one"
            assert uniform(seed, position) == uniform(seed, position)
    # Which every worker must agree on, of whatever version.
    assert [round(uniform(*pair), 9) for pair in ((0, 0), (0, 1), (1, 0), (-1, 5))] == NOISE


NOISE = [0.652448486, 0.034011701, 0.368189516, 0.208527757]


def correlation(left: Sequence[float], right: Sequence[float]) -> float:
    return float(torch.corrcoef(torch.tensor([left, right], dtype=torch.float64))[0, 1])


def test_noise_of_neighbours_has_nothing_in_common() -> None:
    count = 20_000
    bound = 5 / math.sqrt(count)
    by_position = [uniform(42, position) for position in range(count + 64)]
    by_seed = [uniform(seed, 3) for seed in range(count + 64)]
    for numbers in (by_position, by_seed):
        for distance in (1, 2, 3, 16, 64):
            assert abs(correlation(numbers[:count], numbers[distance : count + distance])) < bound
        assert len(set(numbers)) > 0.9999 * len(numbers)
        assert_distributed([int(number * 100) for number in numbers], torch.full((100,), 0.01))
    # A seed's numbers are not another seed's, some positions on.
    assert not {uniform(1, position) for position in range(1000)} & {uniform(2, position) for position in range(1000)}
    assert abs(correlation(by_position, by_seed)) < bound


def test_ties_do_not_depend_on_the_other_rows() -> None:
    """Coarse logits have many; a companion that asks for more candidates must not change which of them are kept."""
    torch.manual_seed(0)
    logits = torch.randint(0, 3, (1, 5000)).float()
    for seed in range(100):
        own = Generation(Submit(bytes(16), (1,), 9, seed, sampling=Sampling(temperature=2, top_k=40)))
        companion = Generation(Submit(bytes(16), (1,), 9, seed, sampling=Sampling(top_k=4000)))
        alone = Sampler(frozenset()).sample(logits.clone(), [own]).tokens[0]
        assert Sampler(frozenset()).sample(logits.repeat(2, 1), [own, companion]).tokens[0] == alone
