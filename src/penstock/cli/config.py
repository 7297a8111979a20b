"""The flags of every command, parsed once into frozen settings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from penstock import __version__
from penstock.backends.simulator import SimulatorConfig
from penstock.cli.bench import add_bench_parser
from penstock.cli.keys import add_key_parser
from penstock.cli.parsers import AUTO, NONE, ParserSettings, check_parsers
from penstock.cluster.address import Address, parse_address
from penstock.cluster.dispatch import DispatchLimits
from penstock.http.admission import Limits
from penstock.http.detached import ResumeLimits
from penstock.http.gate import check_origin
from penstock.http.keys import MOST_LIMIT, Keyring, KeySettings, given_keys
from penstock.http.quota import QuotaLimits
from penstock.http.responses.sqlite_store import StoreLimits, StoreSettings
from penstock.metrics.frontend import Tally
from penstock.router.policy import POLICIES, RouterSettings
from penstock.text.formats.tables import REASONING_FORMATS, TOOL_FORMATS
from penstock.wire.errors import ConfigError

Number = TypeVar("Number", int, float)

ENGINES = ("embedded", "simulator")
ENGINE_FLAGS = (
    "engine",
    "model",
    "served_name",
    "context_length",
    "tool_parser",
    "reasoning_parser",
    "max_batch",
    "kv_blocks",
    "device",
    "threads",
    "kv_memory",
    "token_budget",
    "lease_share",
    "max_sessions",
    "session_grace",
    "step_ms",
    "prefill_rate",
    "block_size",
)
"""What `serve` hands on to its workers as it is."""

FRONT_END_FLAGS = (
    "host",
    "port",
    "grace",
    "max_generations",
    "max_queued",
    "max_body_bytes",
    "stall_timeout",
    "resume_grace",
    "resume_keep",
    "resume_memory",
    "response_store",
    "response_ttl",
    "response_store_size",
    "worker_queue",
    "worker_stall",
    "worker_wait",
    "router",
    "overlap_weight",
    "load_weight",
    "router_temperature",
    "router_prediction_seconds",
    "router_sibling_seconds",
    "router_overload_blocks",
    "router_overload_factor",
    "router_most_ahead",
    "sessions_per_key",
    "transcript_memory",
    "store",
    "key_file",
    "requests_per_minute",
    "tokens_per_minute",
    "key_concurrency",
)
"""What `serve` hands on to its front end as it is."""

SECRET_VARIABLE = "PENSTOCK_LINK_SECRET"  # noqa: S105
"""The links' shared secret is taken from the environment, never from the command line, where others could read it."""

API_KEY_VARIABLE = "PENSTOCK_API_KEY"
"""The same goes for API keys. Those that `serve` was given on its own command line do not get onto another one."""


NO_STORE = "none"
LEAST_STORE_MIB = 1


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
    session_grace: float = 30.0
    reproducible: bool = False


@dataclass(frozen=True)
class WorkerSettings:
    name: str
    listen: Address
    advertise: Address
    store: str | None
    secret: str
    engine: str
    model: Path | None
    served_name: str | None
    context_length: int | None
    parsers: ParserSettings
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
    store: str | None
    secret: str
    limits: Limits
    resume: ResumeLimits
    responses: StoreSettings | None
    dispatch: DispatchLimits
    router: RouterSettings
    worker_stall: float
    sessions_per_key: int
    transcript_memory: float
    keys: KeySettings
    cors_origins: tuple[str, ...]
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
    front_end_environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What only the front end is to know, for it has secrets."""


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
    worker.add_argument("--store", metavar="URL", help="redis://…, where front ends that share it find this worker")
    worker.add_argument("--advertise", metavar="ADDRESS", help="the address that front ends reach it by (default: that of --listen)")
    _add_engine(worker)
    front_end = commands.add_parser("frontend", help="one front end", formatter_class=_Formatter)
    front_end.add_argument("--name", default="frontend", help="its name in the workers' logs")
    front_end.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="a worker's address; repeat for each; others are found in --store",
    )
    _add_front_end(front_end)
    for command in (worker, front_end):
        command.add_argument(
            "--exit-with-parent", action="store_true", help="exit when standard input ends, as it does when the parent dies"
        )
    add_bench_parser(commands)
    add_key_parser(commands)
    return parser


def _add_front_end(parser: argparse.ArgumentParser) -> None:
    limits, resume, dispatch, router = Limits(), ResumeLimits(), DispatchLimits(), RouterSettings()
    group = parser.add_argument_group("front end")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    group.add_argument("--max-generations", type=int, default=limits.max_generations, metavar="N", help="generations at once; more get 429")
    group.add_argument(
        "--max-queued", type=int, default=dispatch.max_queued, metavar="N", help="generations that wait for room at a worker; more get 429"
    )
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
    group.add_argument(
        "--store",
        metavar="URL",
        help="redis://host:port/db: where several front ends keep sessions and find workers (default: in memory, for one front end)",
    )
    group.add_argument("--sessions-per-key", type=int, default=1024, metavar="N", help="sessions of one API key; more get no lease")
    group.add_argument(
        "--transcript-memory",
        type=float,
        default=256.0,
        metavar="MIB",
        help="memory for the tokens of sessions' earlier turns, which then need not be tokenized again",
    )
    _add_keys(parser)
    group.add_argument(
        "--resume-grace",
        type=float,
        default=resume.grace,
        metavar="SECONDS",
        help="how long an answer that can be resumed goes on without its reader",
    )
    group.add_argument(
        "--resume-keep", type=float, default=resume.keep, metavar="SECONDS", help="how long it can be read again after its end"
    )
    group.add_argument(
        "--resume-memory", type=float, default=resume.memory / 2**20, metavar="MIB", help="memory for the events of such answers"
    )
    _add_responses(parser)
    group = parser.add_argument_group("routing")
    group.add_argument("--router", choices=POLICIES, default=router.policy, help="how a worker is chosen")
    group.add_argument("--overlap-weight", type=float, default=router.overlap_weight, metavar="W", help="cost of a block to prefill")
    group.add_argument("--load-weight", type=float, default=router.load_weight, metavar="W", help="cost of a block of load on a worker")
    group.add_argument(
        "--router-temperature",
        type=float,
        default=router.temperature,
        metavar="T",
        help="above 0: workers are drawn, the cheap ones likelier",
    )
    group.add_argument(
        "--router-prediction-seconds",
        type=float,
        default=router.prediction_seconds,
        metavar="SECONDS",
        help="how long a prompt is believed to be cached where it was sent, by engines that do not tell",
    )
    group.add_argument(
        "--router-sibling-seconds",
        type=float,
        default=router.sibling_seconds,
        metavar="SECONDS",
        help="the same for engines that tell, until they do: requests with one new prefix go together",
    )
    group.add_argument(
        "--router-overload-blocks",
        type=float,
        default=router.overload_blocks,
        metavar="N",
        help="a session's worker is left when its load is so many blocks above the least loaded one's",
    )
    group.add_argument(
        "--router-overload-factor",
        type=float,
        default=router.overload_factor,
        metavar="F",
        help="… and so many times what the least loaded one would have with the prompt",
    )
    group.add_argument(
        "--router-most-ahead",
        type=int,
        default=router.most_ahead,
        metavar="N",
        help="a worker with so many generations more than the one with the fewest gets none for its prefixes",
    )
    group.add_argument(
        "--worker-queue",
        type=int,
        default=dispatch.worker_queue,
        metavar="N",
        help="generations that wait at a worker for their first token",
    )
    group.add_argument(
        "--worker-stall",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="a worker that owes tokens and says nothing for so long is given up, and its generations go on elsewhere",
    )
    group.add_argument(
        "--worker-wait",
        type=float,
        default=dispatch.worker_wait,
        metavar="SECONDS",
        help="how long a generation waits for a worker when its model has none",
    )


def _add_responses(parser: argparse.ArgumentParser) -> None:
    limits = StoreLimits()
    group = parser.add_argument_group("stored responses")
    group.add_argument(
        "--response-store",
        metavar="PATH",
        help=f"the file that keeps responses and conversations; {NO_STORE}: they are not kept (default: penstock/responses.db in "
        "$XDG_STATE_HOME or ~/.local/state)",
    )
    group.add_argument(
        "--response-ttl",
        type=float,
        default=limits.seconds,
        metavar="SECONDS",
        help="how long responses, and unused conversations, are kept",
    )
    group.add_argument(
        "--response-store-size",
        type=float,
        default=limits.bytes / 2**20,
        metavar="MIB",
        help="what the file may hold; of what is over, the oldest go first",
    )


def _add_keys(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("API keys", "Without --key-file or an API key, anyone who reaches the port can use the server.")
    group.add_argument("--key-file", type=Path, metavar="PATH", help="keys, as hashes, with their limits; see `penstock key new --help`")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help=f"a key that may come in; repeat for each. Others on this machine can read command lines: prefer {API_KEY_VARIABLE} in the "
        "environment (several: with commas), or --key-file",
    )
    group.add_argument("--requests-per-minute", type=int, metavar="N", help="limit of each key that has none of its own (default: none)")
    group.add_argument(
        "--tokens-per-minute", type=int, metavar="N", help="the same for tokens, of prompts and answers together (default: none)"
    )
    group.add_argument("--key-concurrency", type=int, metavar="N", help="the same for generations at once (default: none)")
    group.add_argument(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="let web pages of this origin, such as https://chat.example.org, use the server; repeat for each; * for all (default: none)",
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
        "--tool-parser",
        default=AUTO,
        metavar="NAME",
        help=f"the format in which the model writes calls of tools: {', '.join(TOOL_FORMATS)}; {AUTO}: by its chat template; {NONE}: none",
    )
    group.add_argument(
        "--reasoning-parser",
        default=AUTO,
        metavar="NAME",
        help=f"the same for its reasoning: {', '.join(REASONING_FORMATS)}",
    )
    group.add_argument(
        "--max-batch",
        type=int,
        metavar="N",
        help=f"generations in a step; more are queued (default: {embedded.max_batch}, simulator {simulator.max_batch})",
    )
    group.add_argument(
        "--kv-blocks",
        type=int,
        metavar="N",
        help=f"KV blocks, of 16 tokens (default: by --kv-memory, simulator {simulator.kv_blocks})",
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
    group.add_argument(
        "--session-grace",
        type=float,
        default=embedded.session_grace,
        metavar="SECONDS",
        help="how much longer than its timeout a worker keeps a session that no front end closes",
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
        "--reproducible",
        action="store_true",
        help="on Intel CPUs: the same rounding whatever is computed together, so that sampled answers never depend on it; slower",
    )
    group = parser.add_argument_group("simulator")
    group.add_argument(
        "--step-ms", type=float, default=simulator.step_ms, help="time of an engine step, which makes one token a generation"
    )
    group.add_argument(
        "--prefill-rate", type=float, default=simulator.prefill_rate, metavar="TOKENS/S", help="prompt tokens computed a second"
    )
    group.add_argument("--block-size", type=int, default=simulator.block_size, metavar="TOKENS", help="tokens of a KV block")


def serve_settings(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> ServeSettings:
    """Checks everything here, so that a mistake is told once and not by every child."""
    _positive("--workers", arguments.workers)
    _check_front_end(arguments)
    _check_resume(arguments)
    _check_responses(arguments, environment)
    _check_keys(arguments, environment)
    _check_engine(arguments)
    worker = [f"--grace={arguments.grace}"]
    worker += [f"--{name.replace('_', '-')}={value}" for name in ENGINE_FLAGS if (value := getattr(arguments, name)) is not None]
    if arguments.reproducible:
        worker.append("--reproducible")
    if arguments.workers > 1 and arguments.threads is None:
        # Together they have the cores that one alone would take.
        worker.append(f"--threads={max(1, (os.cpu_count() or 1) // arguments.workers)}")
    front_end = [f"--{name.replace('_', '-')}={value}" for name in FRONT_END_FLAGS if (value := getattr(arguments, name)) is not None]
    front_end += [f"--cors-origin={origin}" for origin in arguments.cors_origin or ()]
    keys = _api_keys(arguments, environment)
    secrets = {API_KEY_VARIABLE: ",".join(keys)} if keys else {}
    return ServeSettings(arguments.host, arguments.port, arguments.workers, arguments.grace, tuple(worker), tuple(front_end), secrets)


def worker_settings(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> WorkerSettings:
    simulator, embedded = _check_engine(arguments)
    return WorkerSettings(
        name=arguments.name,
        listen=parse_address(arguments.listen),
        advertise=parse_address(arguments.advertise or arguments.listen),
        store=arguments.store,
        secret=environment.get(SECRET_VARIABLE, ""),
        engine=arguments.engine,
        model=arguments.model,
        served_name=arguments.served_name,
        context_length=arguments.context_length,
        parsers=check_parsers(arguments.tool_parser, arguments.reasoning_parser),
        simulator=simulator,
        embedded=embedded,
        grace=_not_negative("--grace", arguments.grace),
        exit_with_parent=arguments.exit_with_parent,
    )


def front_end_settings(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> FrontEndSettings:
    if not arguments.worker and arguments.store is None:
        raise ConfigError("a front end needs workers: give --worker ADDRESS, or --store where they are registered")
    limits, dispatch, router = _check_front_end(arguments)
    return FrontEndSettings(
        name=arguments.name,
        host=arguments.host,
        port=arguments.port,
        workers=tuple(parse_address(text) for text in arguments.worker),
        store=arguments.store,
        secret=environment.get(SECRET_VARIABLE, ""),
        limits=limits,
        resume=_check_resume(arguments),
        responses=_check_responses(arguments, environment),
        dispatch=dispatch,
        router=router,
        worker_stall=arguments.worker_stall,
        sessions_per_key=arguments.sessions_per_key,
        transcript_memory=arguments.transcript_memory,
        keys=_check_keys(arguments, environment),
        cors_origins=tuple(arguments.cors_origin or ()),
        grace=_not_negative("--grace", arguments.grace),
        exit_with_parent=arguments.exit_with_parent,
    )


def _check_front_end(arguments: argparse.Namespace) -> tuple[Limits, DispatchLimits, RouterSettings]:
    if not 0 <= arguments.port < 65536:
        raise ConfigError(f"--port is {arguments.port}: expected 0 to 65535")
    _positive("--worker-stall", arguments.worker_stall)
    _not_negative("--sessions-per-key", arguments.sessions_per_key)
    _not_negative("--transcript-memory", arguments.transcript_memory)
    limits = Limits(
        _positive("--max-generations", arguments.max_generations),
        _positive("--max-body-bytes", arguments.max_body_bytes),
        _positive("--stall-timeout", arguments.stall_timeout),
    )
    dispatch = DispatchLimits(
        worker_queue=_positive("--worker-queue", arguments.worker_queue),
        max_queued=_not_negative("--max-queued", arguments.max_queued),
        worker_wait=_not_negative("--worker-wait", arguments.worker_wait),
    )
    router = RouterSettings(
        policy=arguments.router,
        overlap_weight=arguments.overlap_weight,
        load_weight=arguments.load_weight,
        temperature=arguments.router_temperature,
        prediction_seconds=arguments.router_prediction_seconds,
        sibling_seconds=arguments.router_sibling_seconds,
        overload_blocks=arguments.router_overload_blocks,
        overload_factor=arguments.router_overload_factor,
        most_ahead=arguments.router_most_ahead,
    )
    return limits, dispatch, router


def _check_resume(arguments: argparse.Namespace) -> ResumeLimits:
    return ResumeLimits(
        grace=_not_negative("--resume-grace", arguments.resume_grace),
        keep=_not_negative("--resume-keep", arguments.resume_keep),
        memory=int(_positive("--resume-memory", arguments.resume_memory) * 2**20),
    )


def _check_responses(arguments: argparse.Namespace, environment: Mapping[str, str]) -> StoreSettings | None:
    chosen = arguments.response_store
    size = arguments.response_store_size
    if size < LEAST_STORE_MIB:
        raise ConfigError(f"--response-store-size is {size:g}: expected at least {LEAST_STORE_MIB}")
    limits = StoreLimits(_positive("--response-ttl", arguments.response_ttl), int(size * 2**20))
    if chosen == NO_STORE:
        return None
    if chosen is not None:
        if not chosen:
            raise ConfigError(f"--response-store is empty: expected a path, or {NO_STORE}")
        return StoreSettings(Path(chosen), limits, is_chosen=True)
    state = environment.get("XDG_STATE_HOME") or Path(environment.get("HOME") or Path.cwd()) / ".local" / "state"
    return StoreSettings(Path(state) / "penstock" / "responses.db", limits, is_chosen=False)


def _check_keys(arguments: argparse.Namespace, environment: Mapping[str, str]) -> KeySettings:
    """Reads the key file once, so that a mistake in it is told at the start."""
    for origin in arguments.cors_origin or ():
        check_origin(origin)
    limits = {name: getattr(arguments, name) for name in ("requests_per_minute", "tokens_per_minute", "key_concurrency")}
    settings = KeySettings(given_keys(_api_keys(arguments, environment)), arguments.key_file, QuotaLimits(*limits.values()))
    for name, value in limits.items():
        flag = f"--{name.replace('_', '-')}"
        if value is not None and not 1 <= value <= MOST_LIMIT:
            raise ConfigError(f"{flag} is {value}: expected 1 to {MOST_LIMIT:,}")
        if value is not None and not settings.are_needed:
            raise ConfigError(f"{flag} is {value}, but there are no keys: give --key-file or {API_KEY_VARIABLE}")
    Keyring(settings, Tally())
    return settings


def _api_keys(arguments: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, ...]:
    keys = list(arguments.api_key or ())
    if API_KEY_VARIABLE in environment:
        found = [key.strip() for key in environment[API_KEY_VARIABLE].split(",")]
        if not any(found):
            # Somebody wanted a key and has none: an open server is the last thing that they expect.
            raise ConfigError(f"{API_KEY_VARIABLE} is set but has no key: expected keys with commas between them, or no such variable")
        keys += [key for key in found if key]
    return tuple(keys)


def _check_engine(arguments: argparse.Namespace) -> tuple[SimulatorConfig, EmbeddedSettings]:
    check_parsers(arguments.tool_parser, arguments.reasoning_parser)
    for flag in ("context_length", "max_batch", "kv_blocks", "threads", "kv_memory", "token_budget"):
        value = getattr(arguments, flag)
        if value is not None:
            _positive(f"--{flag.replace('_', '-')}", value)
    if not 0 <= arguments.lease_share <= 1:
        raise ConfigError(f"--lease-share is {arguments.lease_share}: expected 0 to 1")
    max_sessions = _not_negative("--max-sessions", arguments.max_sessions)
    session_grace = _not_negative("--session-grace", arguments.session_grace)
    simulator, embedded = SimulatorConfig(), EmbeddedSettings()
    simulator = SimulatorConfig(
        step_ms=_not_negative("--step-ms", arguments.step_ms),
        prefill_rate=_positive("--prefill-rate", arguments.prefill_rate),
        max_batch=arguments.max_batch or simulator.max_batch,
        kv_blocks=arguments.kv_blocks or simulator.kv_blocks,
        block_size=_positive("--block-size", arguments.block_size),
        lease_share=arguments.lease_share,
        max_sessions=max_sessions,
        session_grace=session_grace,
    )
    embedded = EmbeddedSettings(
        device=arguments.device,
        threads=arguments.threads,
        kv_memory=arguments.kv_memory,
        kv_blocks=arguments.kv_blocks,
        max_batch=arguments.max_batch or embedded.max_batch,
        token_budget=arguments.token_budget,
        lease_share=arguments.lease_share,
        max_sessions=max_sessions,
        session_grace=session_grace,
        reproducible=arguments.reproducible,
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
