"""The simulator's tokens: a pure function of (seed, position), so that any client can predict the exact text."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

from penstock.wire.messages import TokenLogprob

# Tokens come in runs of sixteen: one hash makes them all.
RUN = 16
_RUN_FORMAT = struct.Struct(f"<{RUN}I")
_SEED_AND_POSITION = struct.Struct("<Qq")

_HALF = 0.6931471805599453

SHORTEST = 512
LONGEST = 1024


def run_of_tokens(seed: int, run: int, vocabulary: Sequence[int]) -> list[int]:
    """The tokens at positions `run * RUN` to below `(run + 1) * RUN`."""
    numbers = _RUN_FORMAT.unpack(blake2b(_key(seed, run), digest_size=64).digest())
    size = len(vocabulary)
    return [vocabulary[number % size] for number in numbers]


def tokens_between(seed: int, start: int, stop: int, vocabulary: Sequence[int]) -> list[int]:
    """The tokens at positions `start` to below `stop`."""
    first = start // RUN
    tokens = [token for run in range(first, -(-stop // RUN)) for token in run_of_tokens(seed, run, vocabulary)]
    return tokens[start - first * RUN : stop - first * RUN]


def natural_length(seed: int) -> int:
    """Where the generation ends by itself, unless `ignore_eos`: the position of its end token."""
    return SHORTEST + int.from_bytes(blake2b(_key(seed, -1), digest_size=8).digest()) % (LONGEST - SHORTEST)


def logprob_at(seed: int, position: int, token: int, top: int, vocabulary: Sequence[int]) -> TokenLogprob:
    """A made-up distribution: the token that came is the likeliest, and each alternative is half as likely as the one before."""
    noise = int.from_bytes(blake2b(_key(seed, ~position), digest_size=4).digest()) / 2**32
    alternatives = tokens_between(seed ^ 0x5EED, position * 32, position * 32 + top, vocabulary)
    likeliest = [token, *dict.fromkeys(other for other in alternatives if other != token)][:top]
    ranked = [(other, -_HALF - noise - _HALF * rank) for rank, other in enumerate(likeliest)]
    return TokenLogprob(-_HALF - noise, tuple(ranked))


def _key(seed: int, number: int) -> bytes:
    return _SEED_AND_POSITION.pack(seed & 0xFFFFFFFFFFFFFFFF, number)
