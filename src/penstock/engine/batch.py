"""From the scheduler's choice to the tensors of a step."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from penstock.engine.attention import AttentionPlan, DecodeGroup, PromptPart
from penstock.engine.model import Batch
from penstock.engine.scheduler import Work
from penstock.engine.sequence import Sequence

# Sequences whose gathered keys and values stay in a processor's cache together.
CPU_GROUP = 16
# Pages that a group may take with its padding: one long sequence must not make many short ones as wide.
MOST_GATHERED = 32_768


class BatchBuilder:
    """Prompts first, then the sequences with one token, in groups of like length, so that little of a group is padding."""

    def __init__(self, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        # A GPU would rather have one large group than little padding.
        self._group = CPU_GROUP if device.type == "cpu" else 1 << 30

    def order(self, work: Items[Work]) -> list[Work]:
        """The work in the order of its rows."""
        prompts = [item for item in work if item.length > 1]
        return [*prompts, *sorted((item for item in work if item.length == 1), key=lambda item: item.sequence.computed)]

    def build(self, work: Items[Work], wanted: Items[int]) -> Batch:
        """`work` as ordered. The tokens of a part are its sequence's from the first without KV; `wanted` are rows."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        prompts: list[PromptPart] = []
        for sequence, count in work:
            start, pages = sequence.computed, sequence.pages
            token_ids += sequence.tokens[start : start + count]
            positions += range(start, start + count)
            slots += self._slots(pages, start, count)
            if count > 1:
                held = pages[: -(-(start + count) // self._page_size)]
                prompts.append(PromptPart(len(slots) - count, len(slots), start + count, self._tensor(held)))
        decodes = self._groups([item for item in work if item.length == 1], len(slots))
        plan = AttentionPlan(self._tensor(slots), tuple(prompts), tuple(decodes))
        return Batch(self._tensor(token_ids), self._tensor(positions), self._tensor(wanted), plan)

    def _slots(self, pages: Items[int], start: int, count: int) -> Iterable[int]:
        size = self._page_size
        return [pages[position // size] * size + position % size for position in range(start, start + count)]

    def _groups(self, work: Items[Work], rows: int) -> Iterable[DecodeGroup]:
        row = rows - len(work)
        for group in self._split([item.sequence for item in work]):
            tables = [sequence.pages for sequence in group]
            longest = max(map(len, tables))
            # With a page of its own: what others have in theirs is hidden from it, but a NaN would show through.
            padded = [table + table[-1:] * (longest - len(table)) for table in tables]
            lengths = [sequence.computed + 1 for sequence in group]
            yield DecodeGroup(row, row + len(group), self._tensor(padded), self._tensor(lengths))
            row += len(group)

    def _split(self, sequences: Items[Sequence]) -> Iterable[list[Sequence]]:
        """Shortest first, as they are ordered, so that the last of a group says how wide it is."""
        group: list[Sequence] = []
        for sequence in sequences:
            width = len(sequence.path) + len(sequence.tail)
            if group and (len(group) == self._group or (len(group) + 1) * width > MOST_GATHERED):
                yield group
                group = []
            group.append(sequence)
        if group:
            yield group

    def _tensor(self, numbers: Items[object]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)
