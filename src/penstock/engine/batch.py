"""Turns the scheduler's choice into the tensors of a step."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from penstock.engine.attention import AttentionPlan, DecodeGroup, PromptPart
from penstock.engine.model import Batch, ImageRows
from penstock.engine.scheduler import S, Sequence, Work
from penstock.engine.vision.positions import positions_of
from penstock.engine.vision.store import FeatureStore, Part
from penstock.kv.features import Features
from penstock.wire.images import FIRST_IMAGE_ID

# As many sequences as fit into a processor's cache with their gathered keys and values.
CPU_GROUP = 16
# Pages of a group with its padding. It keeps one long sequence from padding many short ones.
MAX_GROUP_PAGES = 32_768


class BatchBuilder:
    """Prompts come first, then sequences with one token, in groups of similar length, so that groups need little padding.

    `features` are the books of the features in `store`. `has_axes`: positions in an image have three axes.
    """

    def __init__(
        self,
        page_size: int,
        device: torch.device,
        features: Features | None = None,
        store: FeatureStore | None = None,
        *,
        has_axes: bool = False,
    ) -> None:
        self._page_size = page_size
        self._device = device
        self._features = features
        self._store = store
        self._has_axes = has_axes
        # On a GPU one large group is faster, even with more padding.
        self._group = CPU_GROUP if device.type == "cpu" else 1 << 30

    def order(self, work: Items[Work[S]]) -> list[Work[S]]:
        """The work in the order of its rows."""
        prompts = [item for item in work if item.length > 1]
        return [*prompts, *sorted((item for item in work if item.length == 1), key=lambda item: item.sequence.computed)]

    def build(self, work: Items[Work[S]]) -> Batch:
        """`work` comes from `order`."""
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
        if self._features is not None and any(sequence.images for sequence, _ in work):
            return self._with_images(work, token_ids, positions, plan)
        return Batch(self._tensor(token_ids), self._tensor(positions), plan)

    def _with_images(self, work: Items[Work[S]], token_ids: list[int], positions: list[int], plan: AttentionPlan) -> Batch:
        """Rows of images have features instead of a token. Behind its images a sequence needs only a shift of its positions."""
        rows: list[int] = []
        parts: list[Part] = []
        axes = positions, [*positions], [*positions]
        first = 0
        for sequence, count in work:
            start = sequence.computed
            if sequence.images and self._has_axes:
                for axis, places in zip(axes, _positions(sequence, start, count), strict=True):
                    axis[first : first + count] = places
            if sequence.images and start <= sequence.images[-1].last:
                self._add_images(sequence, start, count, first, rows, parts)
            first += count
        if not rows:
            return Batch(self._tensor(token_ids), self._tensor(positions), plan)
        for row in rows:
            # Any token of the vocabulary: its embedding is not used.
            token_ids[row] = 0
        assert self._store is not None
        places = self._tensor(axes if self._has_axes else positions)
        return Batch(self._tensor(token_ids), places, plan, ImageRows(self._tensor(rows), self._store.gather(parts)))

    def _add_images(self, sequence: Sequence, start: int, count: int, first_row: int, rows: list[int], parts: list[Part]) -> None:
        """Adds what the tokens from `start` on have of images: their rows, the first of which is `first_row`, and their features."""
        assert self._features is not None
        tokens, end = sequence.tokens, start + count
        for image in sequence.images:
            if image.last < start or image.first >= end:
                continue
            places = [place for place in range(image.first, min(end, image.last + 1)) if tokens[place] >= FIRST_IMAGE_ID]
            before = sum([place < start for place in places])
            if before < len(places):
                rows += [first_row + place - start for place in places[before:]]
                slots = self._features.slots_held(sequence.request.id, image.span.name)
                parts.append(Part(slots, before, len(places) - before))

    def _slots(self, pages: Items[int], start: int, count: int) -> Iterable[int]:
        size = self._page_size
        return [pages[position // size] * size + position % size for position in range(start, start + count)]

    def _groups(self, work: Items[Work[S]], rows: int) -> Iterable[DecodeGroup]:
        row = rows - len(work)
        for group in self._split([item.sequence for item in work]):
            tables = [sequence.pages for sequence in group]
            longest = max(map(len, tables))
            # Padded with its own last page: padding is masked, but a NaN in a page of others would show through.
            padded = [table + table[-1:] * (longest - len(table)) for table in tables]
            lengths = [sequence.computed + 1 for sequence in group]
            yield DecodeGroup(row, row + len(group), self._tensor(padded), self._tensor(lengths))
            row += len(group)

    def _split(self, sequences: Items[Sequence]) -> Iterable[list[Sequence]]:
        """Sequences come shortest first, so the last one of a group is the widest."""
        group: list[Sequence] = []
        for sequence in sequences:
            width = len(sequence.path) + len(sequence.tail)
            if group and (len(group) == self._group or (len(group) + 1) * width > MAX_GROUP_PAGES):
                yield group
                group = []
            group.append(sequence)
        if group:
            yield group

    def _tensor(self, numbers: Items[object]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def _positions(sequence: Sequence, start: int, count: int) -> Items[Iterable[int]]:
    """By axis."""
    if start > sequence.images[-1].last:
        return [range(start + sequence.position_shift, start + count + sequence.position_shift)] * 3
    return positions_of(sequence.request.images, start, count)
