"""How long a prompt takes when its KV should come from another vLLM, and does not: that one is killed, frozen or out of reach.

Two real vLLMs on a CPU, driven through the worker's backend, with the default patience. From the Submit to the first token, beside the same
with KV that comes, and with a prompt that is computed. Run it with the python of tests/engines/setup.py:

    PYTHONPATH=src:tests $(python tests/engines/setup.py vllm) bench/engines/handover.py
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from contract.disaggregation.pair import Pair, running_pair
from penstock.backends.external.handover import Ticket, unpack_ticket
from penstock.backends.external.in_process import free_port
from penstock.backends.vllm.handover import Whereabouts

LENGTH = 600
TIMES = 3


def out_of_reach(ticket: Ticket) -> Ticket:
    where = msgspec.msgpack.decode(ticket.body, type=Whereabouts)
    body = msgspec.msgpack.encode(replace(where, remote_port=free_port("127.0.0.1"), remote_engine_id=os.urandom(8).hex()))
    return replace(ticket, body=body)


async def measure(
    pair: Pair, name: str, change: Callable[[Ticket], Ticket] = lambda ticket: ticket, before: Callable[[], None] = lambda: None
) -> float:
    """Seconds to the first token. Fails unless the tokens are right."""
    transfer, prompt = os.urandom(16), pair.prompt(name, LENGTH)
    ticket = change(unpack_ticket(await pair.ticket(prompt, transfer))).pack() if name != "computed" else b""
    before()
    request = pair.decoded(prompt, 16, transfer, ticket)
    began = time.monotonic()
    generation = pair.begin(pair.decode, request if ticket else replace(request, source=None))
    await pair.until(lambda: generation.made > 0)
    seconds = time.monotonic() - began
    await pair.until(lambda: generation.terminal is not None)
    assert pair.is_right(generation), name
    return seconds


async def repeated(pair: Pair, name: str, change: Callable[[Ticket], Ticket] = lambda ticket: ticket) -> list[float]:
    return [await measure(pair, f"{name} {number}" if name != "computed" else name, change) for number in range(TIMES)]


async def main() -> None:
    rows: dict[str, list[float]] = {}
    async with running_pair("vllm", "--kv-patience", "2") as pair:
        await measure(pair, "the first")
        rows["the KV comes"] = await repeated(pair, "moved")
        rows["the prompt is computed"] = [await measure(pair, "computed")]
        rows["out of reach"] = await repeated(pair, "out of reach", out_of_reach)
        rows["frozen"] = [await measure(pair, "frozen", before=pair.prefill.freeze)]
        pair.prefill.thaw()
        rows["killed"] = [await measure(pair, "killed", before=pair.prefill.process.kill)]
    for name, seconds in rows.items():
        print(f"{name:24} {statistics.median(seconds):6.2f} s to the first token; worst of {len(seconds)}: {max(seconds):.2f} s")


if __name__ == "__main__":
    asyncio.run(main())
