"""Ids are found in whatever a tokenizer hands back, and nothing else is taken for ids."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import BatchEncoding

from penstock.text.tokenizers.token_ids import as_token_ids
from penstock.wire.errors import TokenIdsError

LIBRARY = Tokenizer(models.WordLevel({"a": 5, "b": 7}, unk_token="a"))


@pytest.mark.parametrize(
    "value",
    [
        [5],
        (5,),
        [[5]],
        {"input_ids": [5], "attention_mask": [1]},
        {"input_ids": [[5]]},
        UserDict({"input_ids": numpy.array([[5]])}),
        BatchEncoding({"input_ids": [[5]], "attention_mask": [[1]]}),
        BatchEncoding({"input_ids": torch.tensor([[5]])}),
        LIBRARY.encode("a"),
        [LIBRARY.encode("a")],
        {"input_ids": LIBRARY.encode("a")},
        numpy.array([5]),
        numpy.array([[5]], dtype=numpy.uint16),
        [numpy.int64(5)],
        [numpy.array([5])],
        torch.tensor([5]),
        torch.tensor([[5]]),
        [torch.tensor(5)],
        [torch.tensor([5])],
    ],
    ids=repr,
)
def test_ids_are_found(value: Any) -> None:
    found = as_token_ids(value)
    assert found == [5]
    assert type(found) is list
    assert type(found[0]) is int


def test_several_and_none() -> None:
    assert as_token_ids([1, 2, 3]) == as_token_ids([[1, 2, 3]]) == as_token_ids(torch.tensor([[1, 2, 3]])) == [1, 2, 3]
    assert as_token_ids([]) == as_token_ids([[]]) == as_token_ids({"input_ids": []}) == []


@pytest.mark.parametrize(
    "value",
    [
        "abc",
        b"abc",
        ["a"],
        ["abc"],
        {"ids": [1]},
        {1: 2, 3: 4},
        [{1: 2, 3: 4}],
        {1, 2},
        None,
        5,
        [None],
        [1.0],
        [1, 2.5],
        [True],
        [1, False],
        [numpy.True_],
        numpy.array([1.5]),
        numpy.array([True]),
        torch.tensor([1.0]),
        torch.tensor(5),
        [-1],
        [3, -1],
        [[1], [2]],
        [[[1]]],
        [torch.tensor([1, 2]), 3],
        pytest.param(iter([1]), id="iterator"),
    ],
    ids=repr,
)
def test_what_are_no_ids_is_refused(value: Any) -> None:
    with pytest.raises(TokenIdsError, match="the tokenizer returned"):
        as_token_ids(value)
    assert issubclass(TokenIdsError, TypeError)
