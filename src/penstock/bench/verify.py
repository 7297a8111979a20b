"""Compares streams of the simulator with their expected text.

The simulator's token is a function of (seed, position, images), so the text is known in advance. If the received text differs, both are
compared as tokens:

    lost        tokens that were received less often than expected
    repeated    tokens that were received more often than expected
    reordered   tokens that were received as often as expected, but in another place: the fewest moves that restore the order

A token that is missing in one place and appears in another counts once, as reordered. If two neighbours are swapped, one counts as
reordered; if two distant tokens are swapped, both do.

A stream that broke off or was interrupted must be right as far as it came. The rest does not count as lost: the client knows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from penstock.backends.simulated_images import seed_with_images
from penstock.backends.simulator import tokens_between
from penstock.bench.stream import Stream
from penstock.text.tokenizers.cache import TokenizerCache, default_directory
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.errors import ConfigError


class Verdict(NamedTuple):
    """The errors of one stream, in tokens."""

    lost: int = 0
    repeated: int = 0
    reordered: int = 0


@dataclass
class Verification:
    """The errors of all streams.

    `incomplete` counts the streams that were verified only as far as they came, `usage_mismatch` the complete ones with a wrong usage.
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
    """Knows the simulator's text for every seed, with this tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def expected_text(self, seed: int, tokens: int, seals: Sequence[bytes] = ()) -> str:
        """`seals` are those of the pixels of the prompt's images, in order."""
        seed = seed_with_images(seed, seals)
        detokenizer = self._tokenizer.detokenizer()
        return detokenizer.feed(tokens_between(seed, 0, tokens, self._tokenizer.ordinary_ids)) + detokenizer.finish()

    def compare(self, expected: str, received: str, complete: bool = True) -> Verdict:
        """Compares two texts; if they differ, as tokens.

        The built-in tokenizer encodes a text to exactly the generated tokens. A model's own tokenizer may not, so its counts are close,
        not exact.
        """
        if received == expected or (not complete and expected.startswith(received)):
            return Verdict()
        return classify(self._tokenizer.encode(expected), self._tokenizer.encode(received), complete)

    def verify(self, streams: Iterable[Stream], max_tokens: int, seals_of: Callable[[int], Sequence[bytes]] = lambda _: ()) -> Verification:
        """Checks every stream. Each has its own seed and ran with `ignore_eos`. `seals_of` gives the images of each number."""
        verification = Verification()
        for stream in streams:
            expected = self.expected_text(stream.seed, max_tokens, seals_of(stream.number))
            verdict = self.compare(expected, stream.text, stream.is_complete)
            usage_is_right = not stream.is_complete or stream.completion_tokens == max_tokens
            verification.add(verdict, stream.is_complete, usage_is_right)
        return verification


def classify(expected: Sequence[int], received: Sequence[int], complete: bool = True) -> Verdict:
    """See the module's docstring. An incomplete stream is compared up to its last token that is in order."""
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
        # From last to first: one received token must not match two expected ones.
        for position in places.get(token, ()):
            index = bisect_left(ends, position)
            if index == len(ends):
                ends.append(position)
            else:
                ends[index] = position
    return len(ends), ends[-1] + 1 if ends else 0


def make_verifier(engine: str | None, tokenizer: str, model: Path | None = None) -> Verifier:
    """For the engine and the tokenizer's fingerprint that the server reports. `model` has the tokenizer; without it, the cache may have it.

    Raises ConfigError when the text cannot be known here.
    """
    if engine != "simulator":
        reason = "does not name its engine" if engine is None else f"has the engine {engine!r}"
        raise ConfigError(f"--verify needs Penstock's simulator, whose text is known in advance; this server {reason}")
    packed = TokenizerCache(default_directory(), model).find(tokenizer)
    if packed is None:
        raise ConfigError("--verify needs the server's tokenizer: give its model directory or GGUF file as --tokenizer")
    return Verifier(packed.load())
