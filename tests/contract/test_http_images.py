"""Images by the routes of the real engines' own servers. The judge is transformers. `--engine vllm` or `--engine sglang` starts them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from contract.images.looking import FAMILIES, FLAGS
from contract.test_http_route import GREEDY, KINDS, START_SECONDS, Running, read_all, tokens
from penstock.backends.external.engine import EngineFacts, EngineImage, EngineRefused, EngineRequest, PromptImages
from penstock.backends.external.images import Placeholder
from penstock.backends.http.engine import HttpEngine
from penstock.cli.engines import find_images
from penstock.config.engines import HttpEngineSettings
from penstock.text.tokenizers.source import pack_tokenizer
from simulated_pictures import sealed_name
from tiny_vision import PLACEHOLDERS, Kind, generate, make_picture, make_prompt, vision_model

pytestmark = [pytest.mark.timeout(START_SECONDS + 300), pytest.mark.filterwarnings("ignore:::(?!penstock)")]

ROUTES = {"vllm": "vllm-tokens", "sglang": "sglang-cumulative"}


class Seeing:
    """A server with a model that reads images."""

    def __init__(self, engine: str, kind: Kind) -> None:
        self.kind, self.directory = kind, vision_model(kind)
        route = KINDS[ROUTES[engine]]
        self.server = Running(replace(route, flags=(*route.flags, *FLAGS.get(engine, ()))), self.directory)
        self.tokenizer = pack_tokenizer(self.directory).load()
        placeholder = find_images(self.directory, self.tokenizer)[1]
        assert placeholder is not None
        self.placeholder: Placeholder = placeholder

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[HttpEngine, EngineFacts]]:
        engine = HttpEngine(HttpEngineSettings(self.server.url), self.tokenizer, self.placeholder)
        facts = await engine.start(lambda reason: pytest.fail(reason))
        try:
            yield engine, facts
        finally:
            await engine.close()

    def ask(self, pictures: Sequence[Image.Image], **fields: Any) -> tuple[EngineRequest, list[int]]:
        """A prompt with these pictures, and the answer of transformers."""
        text = f"<|im_start|>user\n{PLACEHOLDERS[self.kind] * len(pictures)} which?<|im_end|>\n<|im_start|>assistant\n"
        seen = make_prompt(self.directory, text, pictures, as_engines=True)
        named = [EngineImage(sealed_name(bytes(16), each.size, each.tobytes()), each.size, each.tobytes()) for each in pictures]
        images = PromptImages(tuple(self.tokenizer.encode_part(text)), named)
        given: dict[str, Any] = {"max_tokens": 16, "seed": 1, "ignore_eos": True, "sampling": GREEDY, "images": images, **fields}
        request = EngineRequest(secrets.token_hex(16), self.placeholder.expand(seen.token_ids), **given)
        return request, list(generate(self.directory, seen, request.max_tokens))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    wanted = metafunc.config.getoption("engine") or ()
    needs = pytest.param(None, marks=pytest.mark.skip(reason="an engine's own server: --engine vllm or sglang, where it is installed"))
    pairs: list[Any] = [(engine, kind) for engine in wanted if engine in ROUTES for kind in FAMILIES[engine]]
    metafunc.parametrize("seeing", pairs or [needs], indirect=True, scope="module", ids="-".join if pairs else None)


@pytest.fixture(scope="module")
def seeing(request: pytest.FixtureRequest) -> Iterator[Seeing]:
    seeing = Seeing(*request.param)
    try:
        seeing.server.wait_ready()
        yield seeing
    finally:
        seeing.server.stop()


async def test_the_tokens_are_those_of_transformers(seeing: Seeing) -> None:
    first, second = make_picture(1, 96, 64), make_picture(2, 64, 96)
    answers = []
    async with seeing.connected() as (engine, facts):
        assert facts.reads_images
        for pictures in ([first], [first, second], [second, first], [second], [first]):
            request, expected = seeing.ask(pictures)
            answers.append(tokens(await read_all(engine, request)))
            assert answers[-1] == expected
    assert len(set(map(tuple, answers))) == 4


async def test_a_prompt_that_it_expands_to_something_else_is_refused(seeing: Seeing) -> None:
    request, _ = seeing.ask([make_picture(3, 96, 64)])
    assert request.images is not None
    other = make_picture(4, 48, 256)
    request.images.pictures[:] = [EngineImage(bytes(range(16)), other.size, other.tobytes())]
    async with seeing.connected() as (engine, _):
        with pytest.raises(EngineRefused) as caught:
            await read_all(engine, request)
        assert (caught.value.fault.code, caught.value.fault.retryable) == ("image_mismatch", False)
        right, expected = seeing.ask([make_picture(5, 96, 64)])
        assert tokens(await read_all(engine, right)) == expected
