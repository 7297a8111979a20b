"""Which encode worker makes an image."""

from __future__ import annotations

from collections import Counter

from penstock.router.encoders import SPARE_IMAGES, choose_encoder

WORKERS = [f"encode-{number}" for number in range(4)]
NAMES = [number.to_bytes(16) for number in range(400)]


def idle(workers: list[str]) -> dict[str, int]:
    return dict.fromkeys(workers, 0)


def test_without_a_worker_there_is_no_choice() -> None:
    assert choose_encoder(NAMES[0], 64, {}) is None


def test_an_image_has_the_same_worker_in_any_order_and_images_are_spread() -> None:
    chosen = [choose_encoder(name, 64, idle(WORKERS)) for name in NAMES]
    assert chosen == [choose_encoder(name, 64, idle(WORKERS[::-1])) for name in NAMES]
    assert min(Counter(chosen).values()) > len(NAMES) / len(WORKERS) / 2


def test_a_worker_that_leaves_moves_only_its_own_images() -> None:
    for name in NAMES:
        before = choose_encoder(name, 64, idle(WORKERS))
        after = choose_encoder(name, 64, idle(WORKERS[1:]))
        assert after == before or before == WORKERS[0]


def test_a_worker_with_a_long_queue_is_passed_over_and_a_little_more_is_not() -> None:
    own = choose_encoder(NAMES[0], 64, idle(WORKERS))
    assert own is not None
    assert choose_encoder(NAMES[0], 64, idle(WORKERS) | {own: SPARE_IMAGES * 64}) == own
    assert choose_encoder(NAMES[0], 64, idle(WORKERS) | {own: SPARE_IMAGES * 64 + 1}) != own
