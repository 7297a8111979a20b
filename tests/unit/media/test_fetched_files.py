"""Files of images on other servers, for responses that are stored with them."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable

import pytest

from e2e.images.asking import png
from penstock.config.media import MediaSettings
from penstock.fairness import FairBudget
from penstock.media.picture import ImageRef
from penstock.media.reader import MediaReader
from penstock.wire.errors import RequestError


class Web:
    """Other servers, with one file each."""

    def __init__(self, **files: bytes) -> None:
        self.files = files
        self.asked: list[str] = []
        self.turns = FairBudget(1)

    async def fetch(self, url: str, lane: str, weight: float, take: Callable[[int], Awaitable[None]]) -> bytes:
        self.asked.append(url)
        file = self.files[url.removeprefix("https://")]
        await take(len(file))
        return file


def refs(*urls: str) -> list[ImageRef]:
    return [ImageRef(f"input[{index}]", url) for index, url in enumerate(urls)]


async def test_each_is_fetched_once_and_given_back_in_base64() -> None:
    web = Web(a=png(1), b=png(2, (600, 700)))
    reader = MediaReader(fetcher=web)
    files = await reader.fetch(refs("https://a", "data:,", "https://b", "https://a"), "")
    assert sorted(web.asked) == ["https://a", "https://b"]
    assert {url: base64.b64decode(file) for url, file in files.items()} == {"https://a": web.files["a"], "https://b": web.files["b"]}
    reader.check_integrity()
    reader.close()


async def test_what_is_wrong_names_the_field() -> None:
    web = Web(a=png(1), b=b"no picture")
    reader = MediaReader(MediaSettings(max_images=2), web)
    with pytest.raises(RequestError, match=r"`input\[1\]` cannot be read") as refused:
        await reader.fetch(refs("https://a", "https://b"), "")
    assert refused.value.param == "input[1]"
    # All images count, before any is fetched.
    with pytest.raises(RequestError, match="one of 3 images"):
        await reader.fetch(refs("https://a", "data:,", "data:,"), "")
    assert web.asked == ["https://a", "https://b"]
    assert await reader.fetch(refs("data:,", "data:,", "data:,"), "") == {}
    reader.check_integrity()
    reader.close()
    reader = MediaReader()
    with pytest.raises(RequestError, match="fetches no images"):
        await reader.fetch(refs("https://a"), "")
    assert await reader.fetch(refs("data:,"), "") == {}
    reader.close()
