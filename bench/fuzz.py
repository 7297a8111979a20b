"""Sends malformed requests, and checks that the server refuses them and stays as it was.

    python bench/fuzz.py schemathesis   20,000 requests made from /openapi.json, valid and invalid
    python bench/fuzz.py bodies         50,000 malformed bodies to all routes that take one

Starts its own server. Exits with 1 when an answer is a 5xx or does not come, when an error has no message, when an answer contradicts the
document, when the server's memory grows, or when the server's answer at the end differs from the one at the start.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

from fuzzing.bodies import run_bodies
from fuzzing.document import run_schemathesis
from fuzzing.target import PACES, Findings, target


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["schemathesis", "bodies"])
    parser.add_argument("--cases", type=int, help="requests to send (default: schemathesis 20,000, bodies 50,000)")
    parser.add_argument("--engine", choices=list(PACES), default="simulator")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args(arguments)
    cases = given.cases or (20_000 if given.what == "schemathesis" else 50_000)
    findings = Findings()
    began = time.monotonic()
    print(f"seed {given.seed}")
    with target(given.engine) as server:
        if given.what == "schemathesis":
            run_schemathesis(server, cases, given.seed, findings)
        else:
            asyncio.run(run_bodies(server, cases, given.seed, findings))
        server.check_answer(findings)
        server.check_log(findings)
    findings.print()
    print(f"{time.monotonic() - began:.0f} seconds")
    print("FAILED" if findings.problems else "passed")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
