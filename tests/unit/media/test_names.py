"""The small version of bench/images/names.py."""

from __future__ import annotations

from images.names import run


async def test_near_equal_pictures_share_no_name_and_no_block() -> None:
    assert await run(pairs=60, seed=5) == 0
