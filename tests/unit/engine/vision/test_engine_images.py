"""Prompts with images in the embedded engine: token for token those of transformers, however they are cut, moved and mixed."""

from __future__ import annotations

from typing import Any

import pytest

from image_engine import ImageEngine, chat, expected_tokens
from tiny_vision import KINDS, Kind, VisionPrompt, vision_model

EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
FIVE = [(40, 40), (200, 50), (64, 128), (33, 77), (120, 110)]
SIZES = [[], [(96, 64)], [(50, 90), (130, 60)], FIVE]
COUNT = 8


def prompts_of(kind: Kind) -> list[VisionPrompt]:
    return [chat(kind, sizes, seed=10 * index) for index, sizes in enumerate(SIZES)]


@EVERY_KIND
@pytest.mark.parametrize(
    ("slots", "settings"),
    [
        (256, {}),
        (256, {"token_budget": 23}),
        (32, {"token_budget": 64, "kv_pages": 70}),
    ],
    ids=["batched", "cut through images", "preempted, in rounds"],
)
def test_tokens_are_those_of_transformers(kind: Kind, slots: int, settings: dict[str, Any]) -> None:
    """0, 1, 2 and 5 images of all sizes, text between them, over two turns, all at once."""
    prompts = prompts_of(kind)
    rig = ImageEngine(vision_model(kind), slots, **settings)
    requests = [rig.submit(number, prompt, COUNT) for number, prompt in enumerate(prompts)]
    rig.run()
    assert [rig.tokens(request) for request in requests] == expected_tokens(prompts, kind, COUNT)
    rig.close()
