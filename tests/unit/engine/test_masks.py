"""Grammar masks in the engine: filled in threads, applied to logits."""

from __future__ import annotations

import random

import pytest
import torch

from penstock.engine.sampler import MaskPool, apply_mask
from penstock.grammar.grammar import GrammarCompiler, GrammarMatcher
from penstock.wire.messages import Grammar
from tokenizer_kinds import byte_level

TOKENIZER = byte_level(["</s>"])
VOCAB_SIZE = TOKENIZER.get_vocab_size()
COMPILER = GrammarCompiler(TOKENIZER.to_str(), VOCAB_SIZE, frozenset({0}))
REGEXES = ["[0-9]{5,}", "(ab)+", "[x-z]{2,90}", "a*b*c*d+", ".{30}"]


def compiled(regex: str) -> GrammarMatcher:
    return COMPILER.compile(Grammar("regex", regex))


def row_of(matcher: GrammarMatcher) -> torch.Tensor:
    row = torch.zeros(-(-VOCAB_SIZE // 32), dtype=torch.int32)
    matcher.fill_mask(row.data_ptr(), row.numel() * row.element_size())
    return row


def allowed(matcher: GrammarMatcher) -> list[int]:
    logits = torch.zeros((1, VOCAB_SIZE))
    apply_mask(logits, [0], row_of(matcher).unsqueeze(0))
    token_ids: list[int] = torch.nonzero(logits[0] == 0).flatten().tolist()
    return token_ids


def test_masks_in_threads_are_those_made_inline() -> None:
    pool = MaskPool(VOCAB_SIZE, threads=3)
    try:
        matchers = [compiled(regex) for regex in REGEXES]
        chooser = random.Random(5)
        for _ in range(6):
            rows = chooser.sample(range(2 * len(matchers)), len(matchers))
            inline = [row_of(matcher) for matcher in matchers]
            pool.begin(list(zip(matchers, rows, strict=True)))
            bitmask = pool.masks()
            for row, expected in zip(rows, inline, strict=True):
                assert torch.equal(bitmask[row], expected)
            for matcher in matchers:
                matcher.advance(chooser.choice(allowed(matcher)))
    finally:
        pool.close()


def test_a_pool_without_work_and_one_that_is_begun_twice() -> None:
    pool = MaskPool(VOCAB_SIZE)
    pool.begin([])
    assert pool.masks().shape[1] == -(-VOCAB_SIZE // 32)
    matcher = compiled("a+")
    pool.begin([(matcher, 0)])
    pool.begin([(matcher, 7)])
    assert torch.equal(pool.masks()[7], row_of(matcher))
    pool.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))])
def test_only_the_named_rows_are_masked(device: str) -> None:
    bitmask = torch.zeros((3, 2), dtype=torch.int32)
    bitmask[1, 0] = -(2**31)  # the sign bit is token 31
    bitmask[1, 1] = 0b10
    bitmask[2, 0] = 0b1
    logits = torch.ones((3, 40), device=device)
    apply_mask(logits, [2, 1], bitmask)
    finite = [torch.nonzero(row.isfinite()).flatten().tolist() for row in logits]
    assert finite == [list(range(40)), [31, 33], [0]]
    apply_mask(logits, [], bitmask)
    assert logits[0].isfinite().all()
    apply_mask(logits, [0, 1, 2], bitmask)
    assert not logits[0].isfinite().any()
