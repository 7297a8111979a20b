"""The `penstock` command."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

import uvloop

from penstock.cli.doctor import run_doctor
from penstock.cli.flags import make_parser
from penstock.cli.keys import run_key
from penstock.cli.settings import front_end_settings, serve_settings, worker_settings
from penstock.cluster.supervise import EXIT_CONFIG
from penstock.wire.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = make_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", stream=sys.stderr)
    try:
        return _run(parsed)
    except ConfigError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return 130


def _run(parsed: argparse.Namespace) -> int:
    if parsed.command == "bench":
        # Its libraries are heavy, and only it needs them.
        from penstock.cli.bench import run_bench

        return run_bench(parsed)
    if parsed.command == "key":
        return run_key(parsed)
    if parsed.command == "doctor":
        return run_doctor(parsed)
    # Wiring imports everything; parsing and `--help` do not wait for it.
    from penstock.cli import compose

    match parsed.command:
        case "worker":
            return uvloop.run(compose.run_worker(worker_settings(parsed)))
        case "frontend":
            return uvloop.run(compose.run_front_end(front_end_settings(parsed)))
        case _:
            return uvloop.run(compose.run_serve(serve_settings(parsed)))
