"""Files of images on other servers, for responses that are stored with them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest

from e2e.images.asking import png
from penstock.config.media import MediaSettings
from penstock.fairness import FairBudget
from penstock.media.families.simulator import make_rules
from penstock.media.picture import ImageRef
from penstock.media.reader import MediaReader
from penstock.wire.errors import RequestError


class Web:
    """Other servers, with one file each."""

    def __init__(self, **files: bytes) -> None:
        self.files: dict[str, bytes | bytearray] = {**files}
        self.asked: list[str] = []
        self.turns = FairBudget(1)
        self.never_answers = ""

    async def fetch(self, url: str, lane: str, weight: float, take: Callable[[int], Awaitable[None]]) -> bytes | bytearray:
        self.asked.append(url)
        if url == self.never_answers:
            await asyncio.Event().wait()
        file = self.files[url.removeprefix("https://")]
        await take(len(file))
        return file


def refs(*urls: str) -> list[ImageRef]:
    return [ImageRef(f"input[{index}]", url) for index, url in enumerate(urls)]


def allow(_: int) -> None:
    pass


async def test_each_is_fetched_once_and_given_back_in_base64() -> None:
    web = Web(a=png(1), b=png(2, (600, 700)))
    reader = MediaReader(fetcher=web)
    files = await reader.fetch(refs("https://a", "data:,", "https://b", "https://a"), "", 1.0, allow)
    assert sorted(web.asked) == ["https://a", "https://b"]
    assert {url: base64.b64decode(file) for url, file in files.items()} == {"https://a": web.files["a"], "https://b": web.files["b"]}
    reader.check_integrity()
    reader.close()


async def test_what_is_wrong_names_the_field() -> None:
    web = Web(a=png(1), b=b"no picture")
    reader = MediaReader(MediaSettings(max_images=2), web)
    with pytest.raises(RequestError, match=r"`input\[1\]` cannot be read") as refused:
        await reader.fetch(refs("https://a", "https://b"), "", 1.0, allow)
    assert refused.value.param == "input[1]"
    # All images count, before any is fetched.
    with pytest.raises(RequestError, match="one of 3 images"):
        await reader.fetch(refs("https://a", "data:,", "data:,"), "", 1.0, allow)
    assert web.asked == ["https://a", "https://b"]
    assert await reader.fetch(refs("data:,", "data:,", "data:,"), "", 1.0, allow) == {}
    reader.check_integrity()
    reader.close()
    reader = MediaReader()
    with pytest.raises(RequestError, match="fetches no images"):
        await reader.fetch(refs("https://a"), "", 1.0, allow)
    assert await reader.fetch(refs("data:,"), "", 1.0, allow) == {}
    reader.close()


async def test_nobody_waits_for_the_others_when_they_are_too_much() -> None:
    web = Web(a=png(1), b=png(2), c=png(3))
    web.never_answers = "https://c"
    reader = MediaReader(fetcher=web)
    arrived: list[int] = []

    def check(size: int) -> None:
        arrived.append(size)
        if len(arrived) == 2:
            raise RequestError("too much")

    with pytest.raises(RequestError, match="too much"):
        await reader.fetch(refs("https://a", "https://b", "https://c"), "", 1.0, check)
    assert arrived[1] == len(web.files["a"]) + len(web.files["b"])
    reader.check_integrity()
    assert reader.memory.used == 0
    reader.close()


class File(bytearray):
    """A file that weak references may refer to."""


@pytest.mark.parametrize("others", [[], ["https://a"]])
async def test_a_refused_file_is_let_go_with_its_error(others: list[str]) -> None:
    """Without the garbage collector, which comes seldom."""
    web = Web(a=png(1))
    reader = MediaReader(fetcher=web)
    gc.disable()
    try:
        for ask in (
            lambda wanted: reader.fetch(wanted, "", 1.0, allow),
            lambda wanted: reader.read(wanted, "", b"", make_rules()),
        ):
            web.files["broken"] = File(b"no picture")
            fetched = weakref.ref(web.files["broken"])
            with contextlib.suppress(RequestError):
                await ask(refs(*others, "https://broken"))
                pytest.fail("it is no picture")
            del web.files["broken"]
            while reader.decoders.turns.used:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert fetched() is None
    finally:
        gc.enable()
    reader.check_integrity()
    reader.close()
