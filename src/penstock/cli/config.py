"""The flags of every command, parsed once into frozen settings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from penstock import __version__
from penstock.backends.simulator import SimulatorConfig
from penstock.cli.bench import add_bench_parser
from penstock.cluster.address import Address, parse_address
from penstock.http.admission import Limits
from penstock.wire.errors import ConfigError

Number = TypeVar("Number", int, float)

ENGINES = ("embedded", "simulator")
ENGINE_FLAGS = (
    "engine",
    "model",
    "served_name",
    "context_length",
    "max_batch",
    "kv_blocks",
    "device",
    "threads",
    "kv_memory",
    "token_budget",
    "lease_share",
    "max_sessions",
    "step_ms",
    "prefill_rate",
)
"""What `serve` hands on to its workers as it is."""

SECRET_VARIABLE = "PENSTOCK_LINK_SECRET"  # noqa: S105
"""The links' shared secret is taken from the environment, never from the command line, where others could read it."""


@dataclass(frozen=True)
class EmbeddedSettings:
    """What None stands for depends on the model and the device, and is found when they are known."""

    device: str = "auto"
    threads: int | None = None
    kv_memory: float | None = None
    kv_blocks: int | None = None
    max_batch: int = 256
    token_budget: int | None = None
    lease_share: float = 0.5
    max_sessions: int = 1024


@dataclass(frozen=True)
class WorkerSettings:
    name: str
    listen: Address
    secret: str
    engine: str
    model: Path | None
    served_name: str | None
    context_length: int | None
    simulator: SimulatorConfig
    embedded: EmbeddedSettings
    grace: float
    exit_with_parent: bool


@dataclass(frozen=True)
class FrontEndSettings:
    name: str
    host: str
    port: int
    workers: tuple[Address, ...]
    secret: str
    limits: Limits
    grace: float
    exit_with_parent: bool


@dataclass(frozen=True)
class ServeSettings:
    host: str
    port: int
    workers: int
    grace: float
    worker_arguments: tuple[str, ...]
    front_end_arguments: tuple[str, ...]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="An LLM serving stack. Tokens under pressure, none lost.")
    parser.add_argument("--version", action="version", version=f"penstock {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="the whole stack on this machine: workers and front end, supervised", formatter_class=_Formatter
    )
    serve.add_argument("--workers", type=int, default=1, metavar="N", help="worker processes to start")
    _add_front_end(serve)
    _add_engine(serve)
    worker = commands.add_parser("worker", help="one worker", formatter_class=_Formatter)
    worker.add_argument("--name", default="worker-0", help="its name in logs and metrics")
    worker.add_argument(
        "--listen", required=True, metavar="ADDRESS", help="unix:/path or tcp://host:port (TCP needs " + SECRET_VARIABLE + ")"
    )
    worker.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS", help="how long running generations may take to end after SIGTERM"
    )
    _add_engine(worker)
    front_end = commands.add_parser("frontend", help="one front end", formatter_class=_Formatter)
    front_end.add_argument("--name", default="frontend", help="its name in the workers' logs")
    front_end.add_argument("--worker", action="append", required=True, metavar="ADDRESS", help="a worker's address; repeat for each")
    _add_front_end(front_end)
    for command in (worker, front_end):
        command.add_argument(
            "--exit-with-parent", action="store_true", help="exit when standard input ends, as it does when the parent dies"
        )
    add_bench_parser(commands)
    return parser


def _add_front_end(parser: argparse.ArgumentParser) -> None:
    limits = Limits()
    group = parser.add_argument_group("front end")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    group.add_argument("--max-generations", type=int, default=limits.max_generations, metavar="N", help="generations at once; more get 429")
    group.add_argument("--max-body-bytes", type=int, default=limits.max_body_bytes, metavar="N", help="largest request body; more gets 413")
    group.add_argument(
        "--stall-timeout",
        type=float,
        default=limits.stall_seconds,
        metavar="SECONDS",
        help="cut off a reader that takes nothing for so long",
    )
    group.add_argument(
        "--grace", type=float, default=30.0, metavar="SECONDS", help="how long running requests may take to end after SIGTERM"
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    simulator, embedded = SimulatorConfig(), EmbeddedSettings()
    group = parser.add_argument_group("engine")
    group.add_argument("--engine", choices=ENGINES, default="embedded", help="what makes the tokens: a model, or a simulation of one")
    group.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a model directory in Hugging Face's layout, or a GGUF file (default: the model that the set-up installed; for the "
        "simulator, which takes only the tokenizer, readable words)",
    )
    group.add_argument("--served-name", metavar="NAME", help="the model's name in the API (default: the file's or the directory's)")
    group.add_argument(
        "--context-length",
        type=int,
        metavar="TOKENS",
        help="prompt and answer together (default: what the model was trained for; beyond it, positions are stretched by YaRN)",
    )
    group.add_argument(
        "--max-batch",
        type=int,
        metavar="N",
        help=f"generations in a step; more are queued (default: {embedded.max_batch}, simulator {simulator.max_batch})",
    )
    group.add_argument(
        "--kv-blocks", type=int, metavar="N", help=f"KV blocks of 16 tokens (default: by --kv-memory, simulator {simulator.kv_blocks})"
    )
    group = parser.add_argument_group("embedded engine")
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default=embedded.device, help="cpu: float32; cuda: bfloat16")
    group.add_argument(
        "--threads", type=int, metavar="N", help="threads of a step on the CPU (default: one a core, divided among the workers)"
    )
    group.add_argument(
        "--kv-memory", type=float, metavar="GIB", help="memory for KV (default: 2 on the CPU, 85%% of what the weights leave on a GPU)"
    )
    group.add_argument(
        "--token-budget",
        type=int,
        metavar="N",
        help="most tokens that a step computes, prompts and answers together (default: 512 on the CPU, 8192 on a GPU)",
    )
    group.add_argument(
        "--lease-share",
        type=float,
        default=embedded.lease_share,
        metavar="SHARE",
        help="most of the KV that leases protect",
    )
    group.add_argument(
        "--max-sessions", type=int, default=embedded.max_sessions, metavar="N", help="sessions at once; further ones get no lease"
    )
    group = parser.add_argument_group("simulator")
    group.add_argument(
        "--step-ms", type=float, default=simulator.step_ms, help="time of an engine step, which makes one token a generation"
    )
    group.add_argument(
        "--prefill-rate", type=float, default=simulator.prefill_rate, metavar="TOKENS/S", help="prompt tokens computed a second"
    )


def serve_settings(arguments: argparse.Namespace) -> ServeSettings:
    """Checks everything here, so that a mistake is told once and not by every child."""
    _positive("--workers", arguments.workers)
    _limits(arguments)
    _check_engine(arguments)
    worker = [f"--grace={arguments.grace}"]
    worker += [f"--{name.replace('_', '-')}={value}" for name in ENGINE_FLAGS if (value := getattr(arguments, name)) is not None]
    if arguments.workers > 1 and arguments.threads is None:
        # Together they have the cores that one alone would take.
        worker.append(f"--threads={max(1, (os.cpu_count() or 1) // arguments.workers)}")
    front_end = [f"--host={arguments.host}", f"--port={arguments.port}", f"--grace={arguments.grace}"]
    front_end += [f"--max-generations={arguments.max_generations}", f"--max-body-bytes={arguments.max_body_bytes}"]
    front_end += [f"--stall-timeout={arguments.stall_timeout}"]
    return ServeSettings(arguments.host, arguments.port, arguments.workers, arguments.grace, tuple(worker), tuple(front_end))


def worker_settings(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> WorkerSettings:
    simulator, embedded = _check_engine(arguments)
    return WorkerSettings(
        name=arguments.name,
        listen=parse_address(arguments.listen),
        secret=environment.get(SECRET_VARIABLE, ""),
        engine=arguments.engine,
        model=arguments.model,
        served_name=arguments.served_name,
        context_length=arguments.context_length,
        simulator=simulator,
        embedded=embedded,
        grace=_not_negative("--grace", arguments.grace),
        exit_with_parent=arguments.exit_with_parent,
    )


def front_end_settings(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> FrontEndSettings:
    return FrontEndSettings(
        name=arguments.name,
        host=arguments.host,
        port=arguments.port,
        workers=tuple(parse_address(text) for text in arguments.worker),
        secret=environment.get(SECRET_VARIABLE, ""),
        limits=_limits(arguments),
        grace=_not_negative("--grace", arguments.grace),
        exit_with_parent=arguments.exit_with_parent,
    )


def _limits(arguments: argparse.Namespace) -> Limits:
    if not 0 <= arguments.port < 65536:
        raise ConfigError(f"--port is {arguments.port}: expected 0 to 65535")
    return Limits(
        _positive("--max-generations", arguments.max_generations),
        _positive("--max-body-bytes", arguments.max_body_bytes),
        _positive("--stall-timeout", arguments.stall_timeout),
    )


def _check_engine(arguments: argparse.Namespace) -> tuple[SimulatorConfig, EmbeddedSettings]:
    for flag in ("context_length", "max_batch", "kv_blocks", "threads", "kv_memory", "token_budget"):
        value = getattr(arguments, flag)
        if value is not None:
            _positive(f"--{flag.replace('_', '-')}", value)
    if not 0 <= arguments.lease_share <= 1:
        raise ConfigError(f"--lease-share is {arguments.lease_share}: expected 0 to 1")
    simulator, embedded = SimulatorConfig(), EmbeddedSettings()
    simulator = SimulatorConfig(
        step_ms=_not_negative("--step-ms", arguments.step_ms),
        prefill_rate=_positive("--prefill-rate", arguments.prefill_rate),
        max_batch=arguments.max_batch or simulator.max_batch,
        kv_blocks=arguments.kv_blocks or simulator.kv_blocks,
    )
    embedded = EmbeddedSettings(
        device=arguments.device,
        threads=arguments.threads,
        kv_memory=arguments.kv_memory,
        kv_blocks=arguments.kv_blocks,
        max_batch=arguments.max_batch or embedded.max_batch,
        token_budget=arguments.token_budget,
        lease_share=arguments.lease_share,
        max_sessions=_not_negative("--max-sessions", arguments.max_sessions),
    )
    return simulator, embedded


def _positive(flag: str, value: Number) -> Number:
    if not value > 0:
        raise ConfigError(f"{flag} is {value}: expected more than 0")
    return value


def _not_negative(flag: str, value: Number) -> Number:
    if not value >= 0:
        raise ConfigError(f"{flag} is {value}: expected 0 or more")
    return value


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that there are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)
