"""Who says which tokens are right: transformers for a model, the simulator's own rule for the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from chat_model import judge_rows, logits, winners
from penstock.backends.simulator import logprob_at, tokens_between
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.wire.messages import Submit, TokenLogprob

if TYPE_CHECKING:
    import torch

# Engines add up in different orders; between them they were seen to differ by 2e-5.
CLOSE = 1e-3


class Judge(Protocol):
    def expected(self, request: Submit, tokens: Sequence[int]) -> list[int]:
        """The right tokens for a greedy request, as many as these; right behind those before them in `tokens`."""

    def check_logprobs(self, request: Submit, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Fails unless they are those of the generated tokens, and have as many alternatives as were asked for."""

    def check_prompt_logprobs(self, request: Submit, logprobs: Sequence[TokenLogprob | None]) -> None:
        """The same for the prompt's."""


class ModelJudge:
    """Transformers, with the same weights."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def expected(self, request: Submit, tokens: Sequence[int]) -> list[int]:
        return winners(self.directory, request.token_ids, tokens)

    def check_logprobs(self, request: Submit, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        rows = logits(self.directory, request.token_ids, tokens).log_softmax(-1)
        assert len(logprobs) == len(tokens)
        for row, token, logprob in zip(rows, tokens, logprobs, strict=True):
            _check_logprob(row, token, logprob, request.logprobs or 0)

    def check_prompt_logprobs(self, request: Submit, logprobs: Sequence[TokenLogprob | None]) -> None:
        assert len(logprobs) == len(request.token_ids)
        assert logprobs[0] is None
        known = [logprob for logprob in logprobs[1:] if logprob is not None]
        self.check_logprobs(_cut(request), request.token_ids[1:], known)

    def adjusted(
        self, request: Submit, tokens: Sequence[int], counted: Sequence[int] = (), *, punishes_prompt: bool = True, is_late: bool = False
    ) -> list[int]:
        """The winners under penalties and bias.

        `counted`, the end of the prompt, was generated, too. Repetition is that of the prompt as well, unless the engine does not look
        there. One that is late counts a token a step after the next was chosen; until then it takes the prompt's last for it.
        """
        prompt = set(request.token_ids[: len(request.token_ids) - len(counted)]) if punishes_prompt else set()
        rows = logits(self.directory, request.token_ids, tokens).clone()
        for place, row in enumerate(rows):
            made = (*request.token_ids[-1:], *tokens[:place])[:place] if is_late else (*counted, *tokens[:place])
            _adjust(row, request, prompt, Counter(made))
        return judge_rows(rows, tokens)

    def probabilities(self, request: Submit) -> list[float]:
        """How likely each token is right behind the prompt."""
        found: list[float] = logits(self.directory, request.token_ids, (0,))[0].softmax(-1).tolist()
        return found


class SimulatorJudge:
    """Its tokens and their logprobs follow from the seed and the position."""

    def __init__(self, directory: Path) -> None:
        self._ids = tuple(pack_tokenizer(directory).load().ordinary_ids)

    def expected(self, request: Submit, tokens: Sequence[int]) -> list[int]:
        return tokens_between(request.seed, request.offset, request.offset + len(tokens), self._ids)

    def check_logprobs(self, request: Submit, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        top = request.logprobs or 0
        made = [logprob_at(request.seed, position, token, top, self._ids) for position, token in enumerate(tokens, request.offset)]
        assert list(logprobs) == made

    def check_prompt_logprobs(self, request: Submit, logprobs: Sequence[TokenLogprob | None]) -> None:
        top = request.logprobs or 0
        made = [logprob_at(0, index, token, top, self._ids) for index, token in enumerate(request.token_ids)]
        assert list(logprobs) == [None, *made[1:]]


def _cut(request: Submit) -> Submit:
    """As if all but its first token had been generated."""
    return Submit(request.id, request.token_ids[:1], request.max_tokens, request.seed, logprobs=request.logprobs)


def _adjust(row: torch.Tensor, request: Submit, prompt: set[int], counts: Counter[int]) -> None:
    import torch

    sampling = request.sampling
    if sampling.repetition_penalty != 1:
        seen = sorted(prompt | counts.keys())
        values = row[seen]
        row[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    for token, count in counts.items():
        row[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    for token, added in request.logit_bias:
        row[token] += added


def _check_logprob(row: torch.Tensor, token: int, logprob: TokenLogprob, top: int) -> None:
    assert abs(logprob.logprob - float(row[token])) < CLOSE
    assert len(logprob.top) == top
    best = row.topk(top).values.tolist() if top else []
    assert len({other for other, _ in logprob.top}) == top
    for (other, value), right in zip(logprob.top, best, strict=True):
        assert abs(value - float(row[other])) < CLOSE
        assert abs(value - right) < CLOSE
