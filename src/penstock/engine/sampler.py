"""From logits to tokens, for all rows of a step at once.

The order is the usual one: penalties, bias and bans on the logits; then temperature, min-p, top-k and top-p. Logprobs are of the model's
own distribution, before any of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.sequence import SampledSequence
from penstock.grammar.grammar import GrammarMatcher
from penstock.wire.images import is_image_id
from penstock.wire.messages import Sampling, TokenLogprob

# Top-k and top-p look at this many tokens first, and at the whole vocabulary only if these do not suffice: sorting it all is slow.
CANDIDATES = 512
# Below it the likeliest token is practically certain, and float32 weights would be zero.
MIN_TEMPERATURE = 1e-5
NO_TOKEN = -1
"""Drawn from a row without a finite logit: the model is damaged, or a grammar allows nothing."""

# Weights that are summed together when a token is drawn.
SUM_WIDTH = 256

MASK_THREADS = 4
MASK_WORD_BITS = 32

_UINT64 = 2**64 - 1


class Sampled(NamedTuple):
    tokens: list[int]
    logprobs: list[TokenLogprob | None]


class Sampler:
    """`end_ids` are the model's own ends. They are banned while a generation is shorter than its `min_tokens`."""

    def __init__(self, end_ids: frozenset[int]) -> None:
        self._end_ids = sorted(end_ids)

    def sample(self, logits: Tensor, rows: Rows[SampledSequence], restrict: Callable[[Tensor], None] | None = None) -> Sampled:
        """One token per row. Changes `logits`. `restrict` bans, in place, the tokens that grammars do not allow."""
        tops = [row.request.logprobs for row in rows]
        raw = logits.clone() if any(top is not None for top in tops) else logits
        for row, sequence in zip(logits, rows, strict=True):
            _adjust(row, sequence)
            # A grammar may allow nothing but an end.
            if sequence.position < sequence.request.min_tokens and sequence.matcher is None:
                row[self._banned(sequence)] = -math.inf
        if restrict is not None:
            restrict(logits)
        # The largest logit of a row is finite unless one is NaN or all are banned.
        broken = ~logits.amax(-1).isfinite()
        logits[broken] = 0
        tokens = _choose(logits, rows)
        logprobs = _logprobs(raw, tokens, tops)
        return Sampled([NO_TOKEN if wrong else token for token, wrong in zip(tokens, broken.tolist(), strict=True)], logprobs)

    def _banned(self, sequence: SampledSequence) -> list[int]:
        return [*self._end_ids, *sequence.request.stop_ids]


def prompt_logprobs(logits: Tensor, tokens: Rows[int], top: int) -> list[TokenLogprob | None]:
    """The logprobs of known tokens, one per row. The position of an image has none."""
    return _logprobs(logits, list(tokens), [None if is_image_id(token) else top for token in tokens])


def _adjust(row: Tensor, sequence: SampledSequence) -> None:
    """Penalties and bias. The repetition penalty also counts the prompt; the other two count only generated tokens."""
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


def _choose(logits: Tensor, rows: Rows[SampledSequence]) -> list[int]:
    """The likeliest token of rows without a temperature; a drawn one of the others."""
    drawn = [index for index, sequence in enumerate(rows) if sequence.request.sampling.temperature >= MIN_TEMPERATURE]
    if not drawn:
        return _as_list(logits.argmax(-1))
    if len(drawn) == len(rows):
        return _as_list(_draw(logits, rows))
    index = torch.tensor(drawn, device=logits.device)
    chosen = logits.argmax(-1)
    chosen[index] = _draw(logits[index], [rows[row] for row in drawn])
    return _as_list(chosen)


def _draw(logits: Tensor, rows: Rows[SampledSequence]) -> Tensor:
    """The token where the running sum of the probabilities, by token id, passes the row's random number."""
    samplings = [row.request.sampling for row in rows]
    temperatures = torch.tensor([sampling.temperature for sampling in samplings], device=logits.device)
    weights = logits.sub_(logits.amax(-1, keepdim=True)).div_(temperatures[:, None]).exp_()
    if any(sampling.min_p for sampling in samplings):
        # The likeliest token has the weight 1.
        weights[weights < torch.tensor([sampling.min_p for sampling in samplings], device=logits.device)[:, None]] = 0
    filtered = [index for index, sampling in enumerate(samplings) if sampling.top_k or sampling.top_p < 1]
    if filtered:
        index = torch.tensor(filtered, device=logits.device)
        weights[index] = _likeliest(weights[index], [samplings[row] for row in filtered])
    numbers = [uniform(row.request.seed, row.position) for row in rows]
    return _where_passed(weights, torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None])


def _where_passed(weights: Tensor, numbers: Tensor) -> Tensor:
    """The first place of each row where the running sum exceeds `number` times the total: first the group of weights, then the place in it.

    A float64 running sum over a whole large vocabulary would cost more than the rest of sampling.
    """
    if missing := -weights.shape[-1] % SUM_WIDTH:
        weights = torch.nn.functional.pad(weights, (0, missing))
    groups = weights.reshape(len(weights), -1, SUM_WIDTH)
    sums = groups.sum(-1).double().cumsum(-1)
    wanted = sums[:, -1:] * numbers
    group = torch.searchsorted(sums, wanted, right=True)
    before = torch.where(group > 0, sums.gather(-1, (group - 1).clamp_(min=0)), 0)
    inside = groups.gather(1, group[:, :, None].expand(-1, 1, SUM_WIDTH)).squeeze(1).double().cumsum(-1)
    # Rounding may put the wanted sum just above the group's own. Then the last place of the group with any weight is meant.
    place = torch.searchsorted(inside, torch.minimum(wanted - before, inside[:, -1:].nextafter(torch.zeros_like(before))), right=True)
    return (group * SUM_WIDTH + place).squeeze(-1)


def _likeliest(weights: Tensor, samplings: Rows[Sampling], candidates: int = CANDIDATES) -> Tensor:
    """Sets all weights to zero but those of the top-k tokens, and of these, of the top-p.

    Tokens as likely as the last one that is kept are kept as well: which of them came first would depend on the other rows.
    """
    size = weights.shape[-1]
    candidates = min(size, max([candidates, *(sampling.top_k for sampling in samplings)]))
    values = weights.topk(candidates).values
    top_k = torch.tensor([min(sampling.top_k or size, size) for sampling in samplings], device=weights.device)[:, None]
    top_p = torch.tensor([sampling.top_p for sampling in samplings], device=weights.device, dtype=torch.float64)[:, None]
    least_of_top_k = values.gather(-1, (top_k - 1).clamp(max=candidates - 1)).masked_fill_(top_k > candidates, 0)
    in_top_k = values.masked_fill(values < least_of_top_k, 0)
    sums = in_top_k.cumsum(-1, dtype=torch.float64)
    # Top-p is a share of what top-k leaves; without top-k, of the whole vocabulary.
    total = torch.where(top_k < size, sums[:, -1:], weights.sum(-1, keepdim=True, dtype=torch.float64))
    needed = total * top_p
    if candidates < size and bool(((sums[:, -1:] < needed) & (top_k >= size)).any()):
        return _likeliest(weights, samplings, size)
    # A token is kept if those before it do not reach top-p.
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


def uniform(seed: int, position: int) -> float:
    """The random number in (0, 1) that the token at `position` is drawn with. It depends on nothing else.

    So a request gets the same tokens alone or in a batch, after a preemption, and from the middle on another worker. It has 32 bits, so
    that it stays below 1 when multiplied by a sum.
    """
    return ((_mixed(_mixed(seed & _UINT64) ^ position) >> 32) + 0.5) / 2**32


def _mixed(number: int) -> int:
    """One step of splitmix64: every bit of the number changes half of the result's bits."""
    number = (number + 0x9E3779B97F4A7C15) & _UINT64
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _UINT64
    return number ^ (number >> 31)


class MaskPool:
    """Fills the masks of several matchers in threads while the model computes.

    Call `begin`, then `masks`; between the two, the pool owns the matchers. The bitmask changes with the next `begin`.
    """

    def __init__(self, vocab_size: int, threads: int = MASK_THREADS) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="grammar masks")
        self._bitmask = torch.zeros((0, -(-vocab_size // MASK_WORD_BITS)), dtype=torch.int32)
        self._filling: list[Future[None]] = []

    def begin(self, jobs: Rows[tuple[GrammarMatcher, int]]) -> None:
        """Starts to fill the given row for each matcher. Other rows are undefined."""
        self.masks()
        self._grow(1 + max((row for _, row in jobs), default=-1))
        shares = [jobs[start :: self._threads] for start in range(min(self._threads, len(jobs)))]
        self._filling = [self._executor.submit(_fill, share, self._bitmask) for share in shares]

    def masks(self) -> Tensor:
        """Waits until everything that was begun is there. Returns the bitmask, int32 of [rows, words]."""
        filling, self._filling = self._filling, []
        for share in filling:
            share.result()
        return self._bitmask

    def close(self) -> None:
        """Waits for what was begun and ends the threads."""
        self._executor.shutdown()

    def _grow(self, rows: int) -> None:
        held, words = self._bitmask.shape
        if rows > held:
            self._bitmask = torch.zeros((max(rows, 2 * held), words), dtype=torch.int32)


def _fill(jobs: Rows[tuple[GrammarMatcher, int]], bitmask: Tensor) -> None:
    for matcher, index in jobs:
        row = bitmask[index]
        matcher.fill_mask(row.data_ptr(), row.numel() * row.element_size())


def apply_mask(logits: Tensor, rows: Rows[int], bitmask: Tensor) -> None:
    """Sets, in these rows, the logits that the same row of the bitmask forbids to minus infinity, in place."""
    if not rows:
        return
    chosen = bitmask[list(rows)].view(torch.uint8).to(logits.device)
    # A table maps each byte to the eight booleans of its bits, read as one int64: one lookup per byte.
    is_unset = (torch.arange(256, device=logits.device).unsqueeze(1) >> torch.arange(8, device=logits.device)) & 1 == 0
    forbidden = is_unset.view(torch.int64).flatten()[chosen.long()].view(torch.bool)[:, : logits.shape[1]]
    if list(rows) == list(range(logits.shape[0])):
        logits.masked_fill_(forbidden, float("-inf"))
    else:
        index = torch.tensor(rows, device=logits.device)
        logits[index] = logits[index].masked_fill_(forbidden, float("-inf"))
