"""With the same rounding whatever is computed together, a resumed generation has the very logprobs of one that was left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from penstock.wire.messages import Sampling, Submit
from tiny_models import make_engine, make_submit, random_prompt

def run(requests):
    engine = make_engine("llama", kv_pages=4096, reproducible=True)
    made = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for segment in engine.step():
            made.setdefault(segment.id, []).extend(zip(segment.delta.token_ids, segment.delta.logprobs))
    return made

sampling = Sampling(temperature=0.8)
whole = [make_submit(number, random_prompt(number, 24), 460, seed=number, sampling=sampling, logprobs=0) for number in range(12)]
together = run(whole)
for request in whole[:3]:
    assert run([request])[request.id] == together[request.id], "alone"
resumed = []
for number, request in enumerate(whole):
    tokens = tuple(token for token, _ in together[request.id][: 20 + 35 * number])
    prompt = request.token_ids + tokens
    resumed.append(Submit(request.id, prompt, 460, seed=request.seed, sampling=sampling, logprobs=0, offset=len(tokens)))
for request, again in zip(resumed, run(resumed).values()):
    assert again == together[request.id][request.offset :], "resumed"
print("equal")
"""


@pytest.mark.skipif("GenuineIntel" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"), reason="needs an Intel CPU")
def test_rounding_does_not_depend_on_what_is_computed_together() -> None:
    tests = str(Path(__file__).parents[2])
    instructions = "AVX512" if " avx512f " in Path("/proc/cpuinfo").read_text(encoding="utf-8") else "AVX2"
    environment = {**os.environ, "PYTHONPATH": tests, "MKL_CBWR": f"{instructions},STRICT"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment, timeout=100)
    assert done.stdout == "equal\n", done.stderr[-2000:]
