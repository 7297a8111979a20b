"""A request that kills its worker, among others, with real processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from e2e.harness import Server
from e2e.predicted import predicted

POISON = 777
TOKENS = 200
CHOICES = 10


def stream_choices(server: Server, seed: int) -> list[str]:
    """The texts of ten choices, streamed."""
    stream = server.client.completions.create(
        model="simulator", prompt="x", n=CHOICES, max_tokens=TOKENS, seed=seed, stream=True, extra_body={"ignore_eos": True}
    )
    texts = [""] * CHOICES
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    return texts


def poison(server: Server, stream: bool) -> None:
    list(
        server.client.completions.create(
            model="simulator", prompt="x", max_tokens=TOKENS, seed=POISON, stream=stream, extra_body={"ignore_eos": True}
        )
    )


@pytest.mark.parametrize(("tokens", "stream"), [(0, False), (0, True), (3, True)])
def test_a_request_that_kills_its_workers_is_stopped_after_the_second(serve: Callable[..., Server], tokens: int, stream: bool) -> None:
    """Its client gets a status that clients do not retry; of a stream, whose headers are sent when the second worker dies, an event."""
    flags = ["--workers=4", "--step-ms=10", f"--fatal-seed={POISON}", f"--fatal-tokens={tokens}", "--trial-seconds=30"]
    server = serve(*flags)
    with ThreadPoolExecutor(11) as pool:
        bystanders = {seed: pool.submit(stream_choices, server, seed) for seed in range(1000, 1100, CHOICES)}
        with pytest.raises(openai.APIError, match="2 workers died while they ran this request") as caught:
            poison(server, stream)
        for seed, texts in bystanders.items():
            assert texts.result() == [predicted(seed + choice, TOKENS) for choice in range(CHOICES)]
    assert caught.value.code == "kills_workers"
    if not stream:
        assert isinstance(caught.value, openai.UnprocessableEntityError)
    assert len([line for line in server.log if "died (signal 9)" in line]) == 2
    assert server.metric("penstock_generations_stopped_total") == 1
