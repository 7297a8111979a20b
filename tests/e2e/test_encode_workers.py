"""Encode workers as real processes: they make the images, and one that is killed or frozen is not noticed."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from e2e.harness import Server, wait_until
from e2e.predicted import predicted
from penstock.backends.simulated_images import seed_with_images
from penstock.wire.images import seal_of
from pictures import data_url, noise, saved

TOKENS = 24
REQUESTS = 8


def ask(server: Server, seed: int) -> str:
    parts: list[Any] = [{"type": "text", "text": f"What is this, {seed}?"}]
    parts += [{"type": "image_url", "image_url": {"url": data_url(saved(noise(size=(64, 48), seed=each)))}} for each in (seed, seed + 1000)]
    fields = {"messages": [{"role": "user", "content": parts}], "seed": seed, "max_tokens": TOKENS, "ignore_eos": True}
    status, _, answer = server.post("/v1/chat/completions", model="simulator", **fields)
    assert status == 200, answer
    text: str = answer["choices"][0]["message"]["content"]
    return text


def expected(seed: int) -> str:
    seals = []
    for each in (seed, seed + 1000):
        seal = seal_of((64, 48))
        seal.update(noise(size=(64, 48), seed=each).tobytes())
        seals.append(seal.digest())
    return predicted(seed_with_images(seed, seals), TOKENS)


def check(server: Server, seeds: range) -> None:
    with ThreadPoolExecutor(REQUESTS) as pool:
        assert list(pool.map(lambda seed: ask(server, seed), seeds)) == [expected(seed) for seed in seeds]


def test_images_are_made_elsewhere_until_nobody_is_left_and_then_again(serve: Callable[..., Server]) -> None:
    server = serve("--images", "--encode-workers=1", "--encode-ms=500", "--step-ms=2")
    _, _, models = server.request("GET", "/v1/models")
    assert models["data"][0]["penstock"]["roles"] == ["aggregated", "encode"]
    assert models["data"][0]["penstock"]["workers"] == 1
    check(server, range(REQUESTS))
    assert server.metric("penstock_encode_jobs_total", outcome="done") == 2 * REQUESTS
    assert server.metric("penstock_images_total", name="worker-0", source="encoded") == 0
    frozen = server.child("--name=encode-0")
    with ThreadPoolExecutor(REQUESTS) as pool:
        again = [pool.submit(ask, server, seed) for seed in range(100, 100 + REQUESTS)]
        frozen.send_signal(signal.SIGSTOP)
        assert [each.result() for each in again] == [expected(seed) for seed in range(100, 100 + REQUESTS)]
        frozen.kill()
    assert server.metric("penstock_images_total", name="worker-0", source="encoded") > 0
    wait_until(lambda: server.metric("penstock_links_lost_total") == 1 and server.metric("penstock_workers") == 2, 30)
    check(server, range(200, 200 + REQUESTS))
    assert server.metric("penstock_images_total", name="encode-0", source="encoded") == 2 * REQUESTS, "it has begun again"
    wait_until(lambda: server.metric("penstock_encode_jobs_open") == 0)
