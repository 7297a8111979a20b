"""`penstock bench`: its flags, and its parts put together. What is heavy is imported when it runs."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import os
import random
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvloop

from penstock.wire.errors import ConfigError

if TYPE_CHECKING:
    from penstock.bench.client import Client, Model
    from penstock.bench.load import Load, Progress
    from penstock.bench.report import Report

ENDPOINTS = ("completions", "chat")
MOST_SEED = 2**62
INTERRUPTED = 130


@dataclass(frozen=True)
class BenchSettings:
    url: str
    model: str | None
    endpoint: str
    api_key_variable: str | None
    timeout: float
    concurrency: int
    requests: int
    max_tokens: int
    prompt_tokens: int
    seed: int
    ignore_eos: bool
    verify: bool
    tokenizer: Path | None
    processes: tuple[str, ...]
    json: Path | None
    plot: Path | None
    progress: bool


def add_bench_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="load an OpenAI-compatible server, measure it, and verify every token of the simulator's",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        epilog="Exit status: 0 when every request succeeded and, with --verify, no token was lost, repeated or reordered; else 1. "
        "2: a setting that cannot work. 130: interrupted with Ctrl-C; what was measured until then is reported.",
    )
    group = parser.add_argument_group("server")
    group.add_argument("--url", default="http://127.0.0.1:8000", help="where it is")
    group.add_argument("--model", metavar="NAME", help="the model to ask for (default: the server's first)", default=argparse.SUPPRESS)
    group.add_argument("--endpoint", choices=ENDPOINTS, default="completions", help="which of its endpoints to use")
    group.add_argument(
        "--api-key-env", metavar="VARIABLE", help="the environment variable that has the bearer token", default=argparse.SUPPRESS
    )
    group.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="the longest that a request may take")
    group = parser.add_argument_group("load")
    group.add_argument("-c", "--concurrency", type=int, default=64, metavar="N", help="requests at a time")
    group.add_argument("-n", "--requests", type=int, default=256, metavar="N", help="requests in all")
    group.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens to generate for each")
    group.add_argument("--prompt-tokens", type=int, default=16, metavar="N", help="words in each prompt; no two prompts are the same")
    group.add_argument(
        "--seed", type=int, help="seed of the first request; each has the next (default: drawn anew)", default=argparse.SUPPRESS
    )
    group.add_argument("--no-ignore-eos", action="store_true", help="do not send `ignore_eos`, for servers that refuse it")
    group = parser.add_argument_group("what to look at")
    group.add_argument("--verify", action="store_true", help="compare every stream with the text that the simulator must have made")
    group.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="a model directory or GGUF file with the server's tokenizer, for --verify (default: the tokenizer cache of this machine)",
        default=argparse.SUPPRESS,
    )
    group.add_argument(
        "--process",
        action="append",
        metavar="NAME",
        help="measure CPU and memory of this process: NAME=PID, or a part of its command line, such as frontend; repeat for each",
        default=argparse.SUPPRESS,
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures there", default=argparse.SUPPRESS)
    group.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (PNG) there", default=argparse.SUPPRESS)
    group.add_argument("--no-progress", action="store_true", help="no progress bar")


def bench_settings(arguments: argparse.Namespace) -> BenchSettings:
    given: Mapping[str, Any] = vars(arguments)
    for flag in ("concurrency", "requests", "max_tokens", "prompt_tokens", "timeout"):
        if not given[flag] > 0:
            raise ConfigError(f"--{flag.replace('_', '-')} is {given[flag]}: expected more than 0")
    seed = given.get("seed", random.getrandbits(31))
    if not 0 <= seed < MOST_SEED:
        raise ConfigError(f"--seed is {seed}: expected 0 or more, and less than 2^62")
    if arguments.verify and arguments.no_ignore_eos:
        raise ConfigError("--verify needs `ignore_eos`, to know where each text ends: leave out --no-ignore-eos")
    return BenchSettings(
        url=_url(arguments.url),
        model=given.get("model"),
        endpoint=arguments.endpoint,
        api_key_variable=given.get("api_key_env"),
        timeout=arguments.timeout,
        concurrency=arguments.concurrency,
        requests=arguments.requests,
        max_tokens=arguments.max_tokens,
        prompt_tokens=arguments.prompt_tokens,
        seed=seed,
        ignore_eos=not arguments.no_ignore_eos,
        verify=arguments.verify,
        tokenizer=given.get("tokenizer"),
        processes=tuple(given.get("process", ())),
        json=_writable("--json", given.get("json")),
        plot=_writable("--plot", given.get("plot")),
        progress=not arguments.no_progress,
    )


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
    from penstock.bench.processes import ProcessWatch, find_processes
    from penstock.bench.report import make_report
    from penstock.bench.verify import make_verifier

    async with Client(settings.url, settings.endpoint, settings.timeout, _api_key(settings.api_key_variable)) as client:
        model = await _model(client, settings)
        verifier = make_verifier(model.engine, model.tokenizer, settings.tokenizer) if settings.verify else None
        processes = find_processes(settings.processes)
        workload = Workload(
            model.id,
            settings.endpoint,
            settings.requests,
            settings.concurrency,
            settings.max_tokens,
            settings.prompt_tokens,
            settings.seed,
            settings.ignore_eos,
        )
        load = Load(client, workload)
        gc.collect()
        gc.freeze()
        with _progress(settings) as show:
            async with ProcessWatch(processes):
                await load.run(show)
    verification = verifier.verify(load.streams, settings.max_tokens) if verifier is not None else None
    about = {"url": settings.url, "verify": settings.verify, "timeout": settings.timeout, **asdict(workload)}
    report = make_report(load, processes, verification, about)
    _hand_out(settings, load, report)
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


def _hand_out(settings: BenchSettings, load: Load, report: Report) -> None:
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


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.username is not None or parts.password is not None:
        raise ConfigError("--url has a user or password in it: use --api-key-env")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"--url is {text!r}: expected an address such as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")


def _api_key(variable: str | None) -> str | None:
    """The key is taken from the environment, never from the command line, where others could read it."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(f"--api-key-env is {variable}: the environment has no such variable, or it is empty")
    return key


def _writable(flag: str, path: Path | None) -> Path | None:
    """Says now, not after the run, that a file cannot be written."""
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise ConfigError(f"{flag} is {path}: it cannot be written")
    return path


def _raise_file_limit(connections: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems cap it lower; then what is, is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and connections + 32 > soft:
        raise ConfigError(f"--concurrency is {connections}: the limit of open files is {soft}; see ulimit -n")
