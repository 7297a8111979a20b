"""From logits to tokens, for all rows of a step at once.

The order is that of the field: penalties, bias and bans on the logits; then temperature, min-p, top-k and top-p on what is
left. Logprobs are of the model's own distribution, before any of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.noise import uniform
from penstock.engine.sequence import Sequence
from penstock.wire.messages import Sampling, TokenLogprob

# What top-k and top-p look at first; all of the vocabulary only where that is not enough. Sorting it all is slow.
CANDIDATES = 512
# Below it the likeliest token is as good as certain, and a float32 would be zero.
LEAST_TEMPERATURE = 1e-5
NO_TOKEN = -1
"""What is drawn from a row whose scores are not numbers: a model can be damaged, or a grammar at its end."""

BLOCK = 256


class Sampled(NamedTuple):
    tokens: list[int]
    logprobs: list[TokenLogprob | None]


class Sampler:
    """`end_ids` are the model's own ends, which are banned while a generation is too short."""

    def __init__(self, end_ids: frozenset[int]) -> None:
        self._end_ids = sorted(end_ids)

    def sample(self, logits: Tensor, rows: Rows[Sequence], restrict: Callable[[Tensor], None] | None = None) -> Sampled:
        """One token a row. `logits` is changed. `restrict` bans in place what a grammar does not allow."""
        tops = [row.request.logprobs for row in rows]
        raw = logits.clone() if any(top is not None for top in tops) else logits
        for row, sequence in zip(logits, rows, strict=True):
            _adjust(row, sequence)
            # What a grammar allows may be an end alone.
            if sequence.position < sequence.request.min_tokens and sequence.matcher is None:
                row[self._banned(sequence)] = -math.inf
        if restrict is not None:
            restrict(logits)
        # The largest of a row is finite unless there is a NaN or nothing to choose from.
        broken = ~logits.amax(-1).isfinite()
        logits[broken] = 0
        tokens = _choose(logits, rows)
        logprobs = _logprobs(raw, tokens, tops)
        return Sampled([NO_TOKEN if wrong else token for token, wrong in zip(tokens, broken.tolist(), strict=True)], logprobs)

    def _banned(self, sequence: Sequence) -> list[int]:
        return [*self._end_ids, *sequence.request.stop_ids]


def prompt_logprobs(logits: Tensor, tokens: Rows[int], top: int) -> list[TokenLogprob]:
    """The logprobs of tokens that are known, one a row."""
    return [entry for entry in _logprobs(logits, list(tokens), [top] * len(tokens)) if entry is not None]


def _adjust(row: Tensor, sequence: Sequence) -> None:
    """Penalties and bias. Repetition counts the prompt, too; the other two only what was generated."""
    sampling = sequence.request.sampling
    if sequence.generated_counts is not None:
        if sampling.repetition_penalty != 1:
            seen = torch.tensor(sorted(sequence.prompt_tokens | sequence.generated_counts.keys()), device=row.device)
            values = row[seen]
            row[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
        if sequence.generated_counts and (sampling.presence_penalty or sampling.frequency_penalty):
            tokens = torch.tensor(list(sequence.generated_counts), device=row.device)
            counts = torch.tensor(list(sequence.generated_counts.values()), device=row.device)
            row[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if sequence.request.logit_bias:
        ids, biases = zip(*sequence.request.logit_bias, strict=True)
        row[list(ids)] += torch.tensor(biases, device=row.device)


def _choose(logits: Tensor, rows: Rows[Sequence]) -> list[int]:
    """The likeliest of rows without a temperature; of the others, the token at which their noise falls."""
    drawn = [index for index, sequence in enumerate(rows) if sequence.request.sampling.temperature >= LEAST_TEMPERATURE]
    if not drawn:
        return _as_list(logits.argmax(-1))
    if len(drawn) == len(rows):
        return _as_list(_draw(logits, rows))
    index = torch.tensor(drawn, device=logits.device)
    chosen = logits.argmax(-1)
    chosen[index] = _draw(logits[index], [rows[row] for row in drawn])
    return _as_list(chosen)


def _draw(logits: Tensor, rows: Rows[Sequence]) -> Tensor:
    """Where the running sum of the probabilities, in the order of the ids, passes the row's number."""
    samplings = [row.request.sampling for row in rows]
    temperatures = torch.tensor([sampling.temperature for sampling in samplings], device=logits.device)
    weights = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperatures[:, None]).exp_()
    if any(sampling.min_p for sampling in samplings):
        # The likeliest has the weight one.
        weights[weights < torch.tensor([sampling.min_p for sampling in samplings], device=logits.device)[:, None]] = 0
    filtered = [index for index, sampling in enumerate(samplings) if sampling.top_k or sampling.top_p < 1]
    if filtered:
        index = torch.tensor(filtered, device=logits.device)
        weights[index] = _likeliest(weights[index], [samplings[row] for row in filtered])
    numbers = [uniform(row.request.seed, row.position) for row in rows]
    return _where_passed(weights, torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None])


def _where_passed(weights: Tensor, numbers: Tensor) -> Tensor:
    """The first place of each row where the running sum is more than `number` of the whole: first the block, then the place in it.

    A running sum over all of a large vocabulary, in float64, would cost more than the rest of sampling.
    """
    if missing := -weights.shape[-1] % BLOCK:
        weights = torch.nn.functional.pad(weights, (0, missing))
    blocks = weights.reshape(len(weights), -1, BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)
    wanted = sums[:, -1:] * numbers
    block = torch.searchsorted(sums, wanted, right=True)
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp_(min=0)), 0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, 1, BLOCK)).squeeze(1).double().cumsum(-1)
    # Rounding may put the wanted sum a hair beyond the block's own: then the block's last place with any weight is meant.
    place = torch.searchsorted(inside, torch.minimum(wanted - before, inside[:, -1:].nextafter(torch.zeros_like(before))), right=True)
    return (block * BLOCK + place).squeeze(-1)


def _likeliest(weights: Tensor, samplings: Rows[Sampling], candidates: int = CANDIDATES) -> Tensor:
    """The weights with all but the top-k, and of those all but the top-p, set to nothing.

    Those that are as likely as the last that is kept are kept, too: which of them came first would depend on the other rows.
    """
    size = weights.shape[-1]
    candidates = min(size, max([candidates, *(sampling.top_k for sampling in samplings)]))
    values = weights.topk(candidates).values
    top_k = torch.tensor([min(sampling.top_k or size, size) for sampling in samplings], device=weights.device)[:, None]
    top_p = torch.tensor([sampling.top_p for sampling in samplings], device=weights.device, dtype=torch.float64)[:, None]
    least_of_top_k = values.gather(-1, (top_k - 1).clamp(max=candidates - 1)).masked_fill_(top_k > candidates, 0)
    in_top_k = values.masked_fill(values < least_of_top_k, 0)
    sums = in_top_k.cumsum(-1, dtype=torch.float64)
    # Of what top-k leaves; without top-k, of everything, the candidates or not.
    total = torch.where(top_k < size, sums[:, -1:], weights.sum(-1, keepdim=True, dtype=torch.float64))
    needed = total * top_p
    if candidates < size and bool(((sums[:, -1:] < needed) & (top_k >= size)).any()):
        return _likeliest(weights, samplings, size)
    # One is kept if those before it do not suffice.
    least = in_top_k.masked_fill((sums - in_top_k >= needed) | (in_top_k == 0), math.inf).amin(-1, keepdim=True)
    return weights.masked_fill(weights < least, 0)


def _logprobs(logits: Tensor, tokens: list[int], tops: Rows[int | None]) -> list[TokenLogprob | None]:
    wanted = [row for row, top in enumerate(tops) if top is not None]
    found: list[TokenLogprob | None] = [None] * len(tokens)
    if not wanted:
        return found
    index = torch.tensor(wanted, device=logits.device)
    logprobs = logits[index].log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor([tokens[row] for row in wanted], device=logits.device)[:, None]).squeeze(-1).tolist()
    values, ids = logprobs.topk(min(logits.shape[-1], max(1, *(top or 0 for top in tops))))
    for row, logprob, ranked, likeliest in zip(wanted, own, values.tolist(), ids.tolist(), strict=True):
        found[row] = TokenLogprob(logprob, tuple(zip(likeliest, ranked, strict=True))[: tops[row]])
    return found


def _as_list(tokens: Tensor) -> list[int]:
    listed: list[int] = tokens.tolist()
    return listed
