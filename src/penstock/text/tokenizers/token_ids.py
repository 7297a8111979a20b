"""Whatever a tokenizer hands back, as a list of token ids."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Encoding

from penstock.wire.errors import TokenIdsError


def as_token_ids(value: Any) -> list[int]:
    """The ids of a list, an array or a tensor, of an encoding, or of a mapping that has them as `input_ids`; of a batch of one, too.

    Raises TokenIdsError for anything else, above all for what could be taken for ids by mistake: the letters of a string, the keys of a
    mapping, numbers that are not whole.
    """
    if isinstance(value, Encoding):
        # The library's own numbers need no look at each.
        return list(value.ids)
    return _checked(_plain(value))


def _plain(value: Any, in_batch: bool = False) -> Sequence[Any]:
    """A sequence of what should be ids."""
    if isinstance(value, Mapping):
        if "input_ids" not in value:
            raise TokenIdsError(f"the tokenizer returned a mapping with the keys {_shown(list(value))}: expected `input_ids` among them")
        value = value["input_ids"]
    if isinstance(value, Encoding):
        value = value.ids
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise TokenIdsError(f"the tokenizer returned {_shown(value)}, of type {type(value).__name__}: expected token ids")
    if len(value) == 1 and not in_batch and _is_collection(value[0]):
        return _plain(value[0], in_batch=True)
    return value


def _is_collection(value: Any) -> bool:
    value = value.tolist() if hasattr(value, "tolist") else value
    return isinstance(value, Mapping | Sequence | Encoding) and not isinstance(value, str | bytes | bytearray)


def _checked(values: Sequence[Any]) -> list[int]:
    ids = list(values)
    if not set(map(type, ids)) <= {int}:
        ids = [_as_id(one) for one in ids]
    if ids and min(ids) < 0:
        raise TokenIdsError(f"the tokenizer returned the token id {min(ids)}: expected 0 or more")
    return ids


def _as_id(value: Any) -> int:
    # True and false are numbers, but no ids.
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TokenIdsError(f"the tokenizer returned {_shown(value)}, of type {type(value).__name__}, among its ids: expected whole numbers")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:100]}…"
