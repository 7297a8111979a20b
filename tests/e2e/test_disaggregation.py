"""Prefill and decode workers, as real processes: KV moves between them, and a worker that is killed is not noticed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from e2e.harness import Server
from e2e.predicted import predicted

TOKENS = 120
REQUESTS = 12
PROMPT = "the quick brown fox " * 60


def ask(server: Server, seed: int) -> tuple[str, str]:
    """The text, and the worker that its KV came from."""
    fields = {"prompt": f"{seed} {PROMPT}", "seed": seed, "max_tokens": TOKENS, "ignore_eos": True, "nvext": {"extra_fields": ["route"]}}
    status, _, answer = server.post("/v1/completions", model="simulator", **fields)
    assert status == 200, answer
    return answer["choices"][0]["text"], answer["nvext"]["route"][0].get("kv_from", {}).get("worker", "")


def test_prompts_are_computed_elsewhere_until_nobody_is_left(serve: Callable[..., Server]) -> None:
    server = serve("--prefill-workers=1", "--decode-workers=1", "--disaggregation=always", "--step-ms=2")
    _, _, models = server.request("GET", "/v1/models")
    assert models["data"][0]["penstock"]["roles"] == ["prefill", "decode"]
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(lambda seed: ask(server, seed), range(REQUESTS)))
        assert answers == [(predicted(seed, TOKENS), "prefill-0") for seed in range(REQUESTS)]
        assert server.metric("penstock_kv_transfers_total", reason="prefill", outcome="done") == REQUESTS
        assert server.metric("penstock_kv_transfer_bytes_total", reason="prefill") > 0
        again = [pool.submit(ask, server, seed) for seed in range(100, 100 + REQUESTS)]
        server.child("--name=prefill-0").kill()
        assert [each.result()[0] for each in again] == [predicted(seed, TOKENS) for seed in range(100, 100 + REQUESTS)]
    assert server.metric("penstock_kv_transfers_open") == 0
