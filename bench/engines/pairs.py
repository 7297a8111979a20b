"""A pair of real engines behind the real commands: one computes prompts, the other continues them, and the first is frozen, then killed.

Two workers with vLLM or SGLang on a CPU, one core each, beside SGLang also a worker of our own engine, and a front end. Prints the time to
the first token of each request, whether the tokens are those of transformers, and the front end's counters of KV. Run it with the python of
tests/engines/setup.py, for SGLang with the stand-ins of its tests:

    PYTHONPATH=src:tests:tests/engines/pairs $(python tests/engines/setup.py vllm) bench/engines/pairs.py vllm
    PYTHONPATH=src:tests:tests/engines/pairs:tests/engines/sglang_cpu $(python tests/engines/setup.py sglang) bench/engines/pairs.py sglang
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence

import httpx
import psutil

from chat_model import chat_model, random_prompt, winners
from contract.backends.setups import SETUPS
from cpu_engines import BLOCK_SIZE
from penstock.backends.external.in_process import free_port

FLAGS = {
    ("sglang", "prefill"): " --disable-overlap-schedule",
    ("sglang", "decode"): " --disable-overlap-schedule --disaggregation-decode-retraction-backup none",
}
# SGLang keeps a part of its context to itself. Workers of one model must agree on it, and on the size of blocks.
OWN = ("--engine", "embedded", "--device", "cpu", "--threads", "1", "--kv-blocks", "600", "--context-length", "2042", "--model")
OWN_BLOCK_SIZE = 16
COUNTERS = ("penstock_kv_transfers_total", "penstock_kv_transfer_bytes_total", "penstock_migrations_total")
START_SECONDS = 400


def penstock(*arguments: str, core: int | None = None, **environment: str) -> psutil.Popen:
    bound = [] if core is None else ["taskset", "-c", str(core)]
    return psutil.Popen([*bound, sys.executable, "-m", "penstock", *arguments], env={**os.environ, **environment})


def worker(engine: str, role: str, folder: str, core: int) -> psutil.Popen:
    setup = SETUPS[engine]
    arguments = setup.arguments(chat_model(), "--listen", f"unix:{folder}/{role}.sock", "--role", role, "--name", role)
    arguments[arguments.index("--engine-args") + 1] += FLAGS.get((engine, role), "")
    if engine == "sglang":
        arguments = [word.replace(f"--page-size {BLOCK_SIZE}", f"--page-size {OWN_BLOCK_SIZE}") for word in arguments]
    environment = {**setup.environment, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "VLLM_CPU_OMP_THREADS_BIND": str(core)}
    return penstock(*arguments, core=core if engine == "sglang" else None, **environment)


def tree(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


class Client:
    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.AsyncClient(timeout=60)

    async def ask(self, name: str, length: int) -> None:
        prompt, began, first, tokens = random_prompt(name, length), time.monotonic(), 0.0, []
        body = {"model": "chat-model", "prompt": list(prompt), "max_tokens": 16, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        async with self.http.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    tokens += [token for choice in event.get("choices", ()) for token in choice.get("token_ids") or ()]
                    first = first or (time.monotonic() - began if tokens else 0.0)
        verdict = "right" if len(tokens) == 16 and tokens == winners(chat_model(), prompt, tokens) else f"WRONG: {tokens}"
        print(f"{name:16} {length:5} tokens: the first after {first:5.2f} s; {verdict}", flush=True)

    async def counters(self) -> None:
        lines = (await self.http.get(f"{self.url}/metrics")).text.splitlines()
        print(*[f"    {line}" for line in lines if line.startswith(COUNTERS) and not line.endswith(" 0.0")], sep="\n", flush=True)

    async def until_served(self, names: Sequence[str]) -> None:
        async with asyncio.timeout(START_SECONDS):
            while True:
                try:
                    metrics = (await self.http.get(f"{self.url}/metrics")).text
                    if all(f'name="{name}"' in metrics for name in names):
                        return
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.5)


async def measure(client: Client, prefill: psutil.Process) -> None:
    for length in (20, 600, 1500):
        await client.ask("both live", length)
    for process in tree(prefill):
        process.suspend()
    await client.ask("frozen", 600)
    await client.ask("frozen, the next", 600)
    for process in tree(prefill):
        process.resume()
    await asyncio.sleep(3)
    await client.ask("thawed", 600)
    asked = asyncio.create_task(client.ask("killed", 1500))
    await asyncio.sleep(0.02)
    for process in tree(prefill):
        process.kill()
    await asked
    await client.ask("killed, the next", 600)
    await client.counters()


async def main(engine: str) -> None:
    # The judge takes long to load.
    winners(chat_model(), (5,), (5,))
    roles, port = ("prefill", "decode"), free_port("127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="pairs-") as folder:
        running = [worker(engine, role, folder, core % (os.cpu_count() or 1)) for core, role in enumerate(roles)]
        names = [*roles, *(["spare"] if engine == "sglang" else [])]
        if engine == "sglang":
            running.append(penstock("worker", *OWN, str(chat_model()), "--listen", f"unix:{folder}/spare.sock", "--name", "spare"))
        addresses = [word for name in names for word in ("--worker", f"unix:{folder}/{name}.sock")]
        running.append(penstock("frontend", "--port", str(port), "--disaggregation", "always", *addresses))
        try:
            client = Client(f"http://127.0.0.1:{port}")
            await client.until_served(names)
            await measure(client, running[0])
        finally:
            for process in [each for started in running if started.is_running() for each in tree(started)]:
                process.kill()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
