"""What a greedy answer must be, by transformers and the model's own tokenizer: known before any engine is asked."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from chat_model import END_ID, LEAST_LEAD, random_prompt, reference

Adjust = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]
"""From the model's scores for the next token, and the tokens so far, to those that the choice is made by."""


@dataclass(frozen=True)
class Expected:
    """One greedy answer. `token_ids` has the token that ended it; `logprobs` are the model's own, of every token of the vocabulary."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    logprobs: torch.Tensor

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        return "stop" if self.token_ids and self.token_ids[-1] == END_ID else "length"

    def top(self, position: int, count: int) -> dict[int, float]:
        """The likeliest tokens there, the likeliest first."""
        best = self.logprobs[position].topk(count)
        return dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))


class Judge:
    """The model in transformers, and its tokenizer."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._chat: Any = AutoTokenizer.from_pretrained(directory)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @functools.cached_property
    def pieces(self) -> list[bytes]:
        """The bytes of every token, special ones as they are written."""
        # A byte-level tokenizer writes every byte as a character of its own: the printable ones as they are, the others, in their order,
        # as those from 256 on.
        printable = [byte for byte in range(256) if chr(byte) in ByteLevel.alphabet()]
        others = [byte for byte in range(256) if byte not in printable]
        byte_of = {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
        tokens = [str(self.tokenizer.id_to_token(index)) for index in range(self.tokenizer.get_vocab_size())]
        return [bytes(byte_of[character] for character in token) for token in tokens]

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> tuple[int, ...]:
        """The prompt that the model's chat template makes of a conversation."""
        rendered = self._chat.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=True)
        return self.encode(rendered)

    def complete(self, prompt: str | Sequence[int], count: int, adjust: Adjust | None = None) -> Expected:
        """The answer to a prompt, of `count` tokens unless it ends by itself."""
        ids = self.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        return self._completed(ids, count, adjust)

    def chat(self, content: str | Sequence[Mapping[str, Any]], count: int) -> Expected:
        """The answer to a conversation, or to a single message of a user."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return self._completed(self.chat_ids(messages), count, None)

    def complete_all(self, prompts: Sequence[Sequence[int]], count: int) -> list[Expected | None]:
        """The answers to prompts of one length, computed together. None where the choice was too close to blame an engine for another."""
        (_,) = {len(prompt) for prompt in prompts}
        tokens, leads, logprobs = self._greedy(prompts, count, None)
        return [
            self._cut(prompt, row, scores) if lead > LEAST_LEAD else None
            for prompt, row, lead, scores in zip(prompts, tokens, leads, logprobs, strict=True)
        ]

    def prompt_logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """Of every token of the vocabulary, at the place of every token but the first."""
        with torch.inference_mode():
            scores: torch.Tensor = reference(self._directory)(torch.tensor([list(ids)])).logits[0, :-1].log_softmax(-1)
        return scores

    @functools.cache  # noqa: B019 - there is one judge, for as long as the tests run
    def _completed(self, ids: tuple[int, ...], count: int, adjust: Adjust | None) -> Expected:
        [tokens], [lead], [logprobs] = self._greedy([ids], count, adjust)
        made = self._cut(ids, tokens, logprobs)
        assert lead > LEAST_LEAD, f"a near tie in {made.text!r}: no ground to judge an engine on; take another prompt"
        return made

    def _cut(self, ids: Sequence[int], tokens: Sequence[int], logprobs: torch.Tensor) -> Expected:
        if END_ID in tokens:
            tokens = tokens[: tokens.index(END_ID) + 1]
        return Expected(tuple(ids), tuple(tokens), self.decode(tokens), logprobs)

    def _greedy(
        self, prompts: Sequence[Sequence[int]], count: int, adjust: Adjust | None
    ) -> tuple[list[list[int]], list[float], list[torch.Tensor]]:
        """Tokens, how far the likeliest led where it was closest, and logprobs, a row each; on beyond the end of a message."""
        model, cache = reference(self._directory), None
        step = torch.tensor([list(prompt) for prompt in prompts])
        tokens: list[list[int]] = [[] for _ in prompts]
        leads: list[torch.Tensor] = []
        logprobs: list[torch.Tensor] = []
        with torch.inference_mode():
            for _ in range(count):
                made = model(step, past_key_values=cache, use_cache=True)
                scores, cache = made.logits[:, -1], made.past_key_values
                logprobs.append(scores.log_softmax(-1))
                if adjust is not None:
                    scores = torch.stack([adjust(row, before) for row, before in zip(scores, tokens, strict=True)])
                best = scores.topk(2)
                leads.append(best.values[:, 0] - best.values[:, 1])
                step = best.indices[:, :1]
                for row, token in zip(tokens, step[:, 0].tolist(), strict=True):
                    row.append(token)
        return tokens, torch.stack(leads).amin(0).tolist(), list(torch.stack(logprobs, 1))


@dataclass(frozen=True)
class Biased:
    """Some tokens are likelier than the model has it, or less likely."""

    biases: Mapping[int, float]

    def __hash__(self) -> int:
        return hash(tuple(self.biases.items()))

    def __call__(self, scores: torch.Tensor, _: Sequence[int]) -> torch.Tensor:
        return scores.index_add(0, torch.tensor(list(self.biases)), torch.tensor(list(self.biases.values())))


@functools.cache
def late_end(judge: Judge, count: int = 40, earliest: int = 5) -> tuple[tuple[int, ...], float, int]:
    """A prompt, a bias with which the model's own end comes first at a place that is not the beginning, and that place."""
    for seed in itertools.count(500):
        prompt = random_prompt(seed, 12)
        free = judge.complete(prompt, count)
        behind = (free.logprobs.amax(-1) - free.logprobs[:, END_ID]).tolist()
        for place in range(earliest, count):
            if behind[place] < (before := min(behind[:place])) - 0.2:
                return prompt, round((behind[place] + before) / 2, 3), place
    raise AssertionError


@functools.cache
def sure_answers(judge: Judge, first_seed: int, count: int, tokens: int) -> list[Expected]:
    """So many answers to prompts of their own, of that many tokens, or somewhat fewer where the model ends by itself.

    More are computed than are needed, for some choices are too close to call, and some ends come too soon.
    """
    sure: list[Expected] = []
    for seed in itertools.count(first_seed, count + count // 4):
        made = judge.complete_all([random_prompt(number, 12) for number in range(seed, seed + count + count // 4)], tokens)
        sure += [one for one in made if one is not None and len(one.token_ids) > tokens // 2]
        if len(sure) >= count:
            break
    return sure[:count]
