"""What a stream of the simulator must have been, and what is wrong with it where it was not.

The token at a position is a function of (seed, position), so the whole text is known before it is asked for. Where the text
that came differs, both are compared as tokens:

    lost        expected and not received: occurrences of a token that the received text has too few of
    repeated    received and not expected: occurrences of a token that the received text has too many of
    reordered   received as often as expected, but not in its place: the fewest tokens to move to put the rest in order

So a token that is gone at one place and there at another counts once, as reordered, not as lost and repeated as well. Of two
neighbours that changed places one is reordered; of two that were further apart, both are.

A stream that broke off, or was interrupted, has to be right as far as it came; the rest is not lost, for the client knows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from penstock.backends.simulated_tokens import tokens_between
from penstock.bench.stream import Stream
from penstock.text.tokenizers.source import BUILT_IN, load_tokenizer
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.errors import ConfigError


class Verdict(NamedTuple):
    """What is wrong with one stream, in tokens."""

    lost: int = 0
    repeated: int = 0
    reordered: int = 0


@dataclass
class Verification:
    """What is wrong with all of them.

    `incomplete` counts those that were verified only as far as they came, `usage_mismatch` the complete ones whose usage is
    not what was asked for.
    """

    streams: int = 0
    incomplete: int = 0
    wrong_streams: int = 0
    lost: int = 0
    repeated: int = 0
    reordered: int = 0
    usage_mismatch: int = 0

    def add(self, verdict: Verdict, complete: bool, usage_is_right: bool) -> None:
        self.streams += 1
        self.incomplete += not complete
        self.wrong_streams += any(verdict) or not usage_is_right
        self.lost += verdict.lost
        self.repeated += verdict.repeated
        self.reordered += verdict.reordered
        self.usage_mismatch += not usage_is_right


class Verifier:
    """Knows the text of every seed, as a simulator with this tokenizer makes it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def expected_text(self, seed: int, tokens: int) -> str:
        detokenizer = self._tokenizer.detokenizer()
        return detokenizer.feed(tokens_between(seed, 0, tokens, self._tokenizer.ordinary_ids)) + detokenizer.finish()

    def compare(self, expected: str, received: str, complete: bool = True) -> Verdict:
        """Compares texts; those that differ, as tokens.

        The built-in tokenizer gives back the very tokens that were made. A model's own gives other tokens for the same text,
        so that its counts are close, not exact.
        """
        if received == expected or (not complete and expected.startswith(received)):
            return Verdict()
        return classify(self._tokenizer.encode(expected), self._tokenizer.encode(received), complete)

    def verify(self, streams: Iterable[Stream], max_tokens: int) -> Verification:
        """Checks every stream, each made with its own seed and `ignore_eos`."""
        verification = Verification()
        for stream in streams:
            expected = self.expected_text(stream.seed, max_tokens)
            verdict = self.compare(expected, stream.text, stream.is_complete)
            usage_is_right = not stream.is_complete or stream.completion_tokens == max_tokens
            verification.add(verdict, stream.is_complete, usage_is_right)
        return verification


def classify(expected: Sequence[int], received: Sequence[int], complete: bool = True) -> Verdict:
    """See the module's docstring. A stream that is not complete is expected up to the last of its tokens that is in order."""
    in_order, end = _longest_in_order(expected, received)
    if not complete:
        expected = expected[:end]
    common = (Counter(expected) & Counter(received)).total()
    return Verdict(len(expected) - common, len(received) - common, common - in_order)


def _longest_in_order(expected: Sequence[int], received: Sequence[int]) -> tuple[int, int]:
    """The length of the longest common subsequence, and where in `expected` the earliest one ends.

    Hunt and Szymanski's algorithm: `ends[k]` is the earliest position at which a common subsequence of k + 1 tokens can end.
    """
    places: defaultdict[int, list[int]] = defaultdict(list)
    for position in range(len(expected) - 1, -1, -1):
        places[expected[position]].append(position)
    ends: list[int] = []
    for token in received:
        # From last to first: one received token must not be used for two expected ones.
        for position in places.get(token, ()):
            index = bisect_left(ends, position)
            if index == len(ends):
                ends.append(position)
            else:
                ends[index] = position
    return len(ends), ends[-1] + 1 if ends else 0


def make_verifier(engine: str | None, tokenizer_name: str) -> Verifier:
    """For what the server tells of its model, or does not. Raises ConfigError when the model's text cannot be known here."""
    if engine != "simulator":
        told = "does not say that it is" if engine is None else f"has the engine {engine!r}"
        raise ConfigError(f"--verify needs Penstock's simulator, whose text is known; this server {told}")
    if tokenizer_name != BUILT_IN and not Path(tokenizer_name).is_dir():
        raise ConfigError(f"--verify needs the server's tokenizer, and {tokenizer_name!r} is no directory on this machine")
    return Verifier(load_tokenizer(tokenizer_name))
