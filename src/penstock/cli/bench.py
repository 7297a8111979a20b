"""`penstock bench`: its settings and its wiring. Heavy libraries are imported when it runs."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import random
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvloop

from penstock.config.resolve import add_flags, resolve
from penstock.config.setting import narrowed, setting, settings_of
from penstock.wire.errors import ConfigError

if TYPE_CHECKING:
    from penstock.bench.client import Client, Model
    from penstock.bench.load import Load, Progress
    from penstock.bench.report import Report

MAX_SEED = 2**62 - 1
INTERRUPTED = 130


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.username is not None or parts.password is not None:
        raise ConfigError("--url has a user or password in it: use --api-key-env")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("expected an address such as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True)
class BenchSettings:
    """What to ask of a server, and what to report."""

    url: str = setting("http://127.0.0.1:8000", "address of the server", group="server under test", unit="URL", parse=_url)
    model: str | None = setting(None, "model to use", group="server under test", unit="NAME", unset="the server's first")
    endpoint: str = setting("completions", "endpoint to use", group="server under test", choices=("completions", "chat"))
    api_key_env: str | None = setting(None, "environment variable that has the API key", group="server under test", unit="VARIABLE")
    timeout: float = setting(600.0, "longest time that a request may take", group="server under test", unit="SECONDS", above=0)
    concurrency: int = setting(64, "requests at the same time", group="load", unit="N", minimum=1, aliases=("-c",))
    requests: int = setting(256, "requests in total", group="load", unit="N", minimum=1, aliases=("-n",))
    max_tokens: int = setting(128, "tokens to generate per request", group="load", unit="TOKENS", minimum=1)
    prompt_tokens: int = setting(16, "words per prompt; all prompts differ", group="load", unit="WORDS", minimum=1)
    seed: int | None = setting(
        None,
        "seed of the first request; it grows by one per request",
        group="load",
        unit="N",
        minimum=0,
        maximum=MAX_SEED,
        unset="random",
    )
    ignore_eos: bool = setting(True, "send `ignore_eos`; switch it off for servers that refuse it", group="load")
    verify: bool = setting(False, "compare every stream with the text that the simulator must make", group="report")
    tokenizer: Path | None = setting(
        None,
        "model directory or GGUF file with the server's tokenizer, for --verify",
        group="report",
        unit="PATH",
        unset="the tokenizer cache of this machine",
    )
    processes: tuple[str, ...] = setting(
        (),
        "measure CPU and memory of this process: NAME=PID, or a part of its command line, such as frontend; repeat for several",
        group="report",
        name="process",
        unit="NAME",
    )
    json: Path | None = setting(None, "write all figures to this file", group="report", unit="FILE")
    plot: Path | None = setting(None, "write a picture (PNG) to this file", group="report", unit="FILE")
    progress: bool = setting(True, "show a progress bar", group="report")


def add_bench_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="load an OpenAI-compatible server, measure it, and verify every token of the simulator",
        epilog="Exit status: 0 if every request succeeded and, with --verify, no token was lost, repeated or reordered; else 1. "
        "2: a setting that cannot work. 130: interrupted with Ctrl-C; the figures so far are reported.",
    )
    add_flags(parser, settings_of(BenchSettings))


def bench_settings(arguments: argparse.Namespace) -> BenchSettings:
    """Only flags count here. Raises ConfigError."""
    settings = resolve(settings_of(BenchSettings), arguments, {}, {}).build(BenchSettings)
    if settings.verify and not settings.ignore_eos:
        raise ConfigError("--verify needs `ignore_eos`, to know where each text ends: leave out --no-ignore-eos")
    _check_writable("--json", settings.json)
    _check_writable("--plot", settings.plot)
    return settings


def run_bench(parsed: argparse.Namespace) -> int:
    settings = bench_settings(parsed)
    try:
        import penstock.bench.plot  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ConfigError(f"penstock bench needs the package {missing.name!r}: pip install 'penstock[bench]'") from missing
    if settings.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs the package 'matplotlib': pip install 'penstock[bench]'")
    _raise_file_limit(settings.concurrency)
    return uvloop.run(_bench(settings))


async def _bench(settings: BenchSettings) -> int:
    from penstock.bench.client import Client
    from penstock.bench.load import Load, Workload
    from penstock.bench.processes import find_processes, watch
    from penstock.bench.report import make_report
    from penstock.bench.verify import make_verifier

    async with Client(settings.url, settings.endpoint, settings.timeout, _api_key(settings.api_key_env)) as client:
        model = await _model(client, settings)
        verifier = make_verifier(model.penstock.engine, model.penstock.tokenizer, settings.tokenizer) if settings.verify else None
        processes = find_processes(settings.processes)
        seed = random.getrandbits(31) if settings.seed is None else settings.seed
        workload = narrowed(settings, Workload, model=model.id, seed=seed)
        load = Load(client, workload)
        gc.collect()
        gc.freeze()
        with _progress(settings) as show:
            async with watch(processes):
                await load.run(show)
    verification = verifier.verify(load.streams, settings.max_tokens) if verifier is not None else None
    about = {"url": settings.url, "verify": settings.verify, "timeout": settings.timeout, **asdict(workload)}
    report = make_report(load, processes, verification, about)
    _write_report(settings, load, report)
    if load.interrupted:
        return INTERRUPTED
    return 0 if report.is_good else 1


async def _model(client: Client, settings: BenchSettings) -> Model:
    """The model to ask for, as the server describes it."""
    from penstock.bench.client import Model

    models = await client.models()
    if not models and settings.model is not None:
        return Model(settings.model)
    if not models:
        raise ConfigError(f"--url {settings.url}: the server lists no model; wait until it is ready, or name one with --model")
    known = ", ".join(model.id for model in models)
    for model in models:
        if settings.model in (None, model.id):
            return model
    raise ConfigError(f"--model is {settings.model!r}: the server has {known}")


def _write_report(settings: BenchSettings, load: Load, report: Report) -> None:
    from rich.console import Console

    from penstock.bench.plot import write_plot
    from penstock.bench.report import print_report

    console = Console(highlight=False)
    print_report(report, console)
    try:
        if settings.json is not None:
            settings.json.write_bytes(report.json())
        if settings.plot is not None:
            write_plot(settings.plot, load, report)
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}") from error


@contextlib.contextmanager
def _progress(settings: BenchSettings) -> Iterator[Callable[[Progress], None]]:
    from rich.console import Console

    from penstock.bench.report import progress_bar

    console = Console(file=sys.stderr)
    if not settings.progress or not console.is_terminal:
        yield lambda _: None
        return
    with progress_bar(console, settings.requests) as show:
        yield show


def _api_key(variable: str | None) -> str | None:
    """The API key, from the environment: other users of the machine can read command lines."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"--api-key-env is {variable}: the environment has no such variable, or it is empty")
    return key


def _check_writable(flag: str, path: Path | None) -> None:
    """Raises ConfigError before the run for a file that cannot be written after it."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise ConfigError(f"{flag} is {path}: it cannot be written")


def _raise_file_limit(connections: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems cap it lower: keep the current limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and connections + 32 > soft:
        raise ConfigError(f"--concurrency is {connections}: the limit of open files is {soft}; see ulimit -n")
