"""Prefill and decode workers as processes: some die, one freezes, transfers are spoiled, and no client notices."""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil

from .harness import Server, wait_until
from .predicted import predicted

NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
STREAMS, TOKENS = 16, 150
PROMPT = " ".join(str(number) for number in range(300))
"""Over 600 tokens."""
FLAGS = (
    *("--prefill-workers", "2", "--decode-workers", "2", "--disaggregation", "always", "--step-ms", "10"),
    *("--kv-block-bytes", "65536", "--worker-stall", "1.5", "--fault", "transfer:drop=0.1,stall=0.05,corrupt=0.1"),
    # Three workers are lost within two seconds: a request that was at all of them would look as if it killed them.
    *("--trial-seconds", "0"),
)


def workers_of(server: Server) -> dict[str, psutil.Process]:
    children = [(child, child.cmdline()) for child in psutil.Process(server.process.pid).children()]
    return {name: child for child, words in children for name in NAMES if f"--name={name}" in words}


def ask(server: Server, seed: int) -> str:
    stream = server.client.completions.create(
        model="simulator", prompt=f"{seed} {PROMPT}", max_tokens=TOKENS, seed=seed, stream=True, extra_body={"ignore_eos": True}
    )
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def test_prompts_move_while_workers_die_and_freeze(serve: Callable[..., Server]) -> None:
    server = serve(*FLAGS)
    workers = workers_of(server)
    with ThreadPoolExecutor(STREAMS) as pool:
        asked = [pool.submit(ask, server, seed) for seed in range(STREAMS)]
        wait_until(lambda: server.metric("penstock_tokens_delivered_total") > STREAMS, 30)
        workers["prefill-0"].kill()
        workers["decode-1"].send_signal(signal.SIGSTOP)
        wait_until(lambda: server.metric("penstock_workers_stalled_total") >= 1, 30)
        workers["decode-0"].kill()
        workers["decode-1"].send_signal(signal.SIGCONT)
        asked += [pool.submit(ask, server, seed) for seed in range(STREAMS, 2 * STREAMS)]
        texts = [each.result(60) for each in asked]
    assert texts == [predicted(seed, TOKENS) for seed in range(2 * STREAMS)]
    assert server.metric("penstock_kv_transfers_total", reason="prefill", outcome="done") > 0
    wait_until(lambda: server.metric("penstock_workers") == 4, 30)
    wait_until(lambda: server.metric("penstock_kv_transfers_open") == 0)
    for name in NAMES:
        wait_until(lambda name=name: server.metric("penstock_kv_blocks", name=name, state="used") == 0)  # type: ignore[misc]
        for side in ("export", "import"):
            wait_until(lambda name=name, side=side: server.metric("penstock_kv_transfers_held", name=name, side=side) == 0)  # type: ignore[misc]
    assert not [line for line in server.log if "does not hold block" in line]
