"""What the flags of every command come to: checked once, and frozen."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from penstock.api.auth.gate import check_origin
from penstock.api.auth.keys import MOST_LIMIT, Keyring, KeySettings, given_keys
from penstock.api.responses.store import StoreSettings
from penstock.backends.http.settings import Route, checked_url
from penstock.cluster.links.link import Address, parse_address
from penstock.config.engines import EmbeddedSettings, SimulatorConfig
from penstock.config.front_end import DispatchLimits, Limits, QuotaLimits, ResumeLimits, RouterSettings, StoreLimits
from penstock.metrics.frontend import Tally
from penstock.text.formats.chosen import ParserSettings, check_parsers
from penstock.wire.errors import ConfigError

Number = TypeVar("Number", int, float)

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
    "engine_args",
    "url",
    "route",
    "upstream_model",
    "kv_events",
    "kv_replay",
)
"""What `serve` hands on to its workers as it is."""

ENGINE_SWITCHES = ("reproducible", "streaming_sessions", "any_engine_version")
"""The same for those that are on or off."""

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
    "router_max_lead",
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


ENGINES_OF_OTHERS = ("vllm", "sglang", "http")


@dataclass(frozen=True)
class ForeignSettings:
    """For the engines of others. What None stands for is the engine's to say; `engine_args` are in its own words."""

    engine_args: tuple[str, ...] = ()
    any_version: bool = False
    streaming_sessions: bool = False
    max_batch: int | None = None
    kv_memory: float | None = None
    kv_blocks: int | None = None
    block_size: int | None = None
    max_sessions: int = 1024
    session_grace: float = 30.0
    url: str | None = None
    route: Route = "auto"
    upstream_model: str | None = None
    kv_events: str | None = None
    kv_replay: str | None = None


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
    foreign: ForeignSettings
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
    worker += [f"--{name.replace('_', '-')}" for name in ENGINE_SWITCHES if getattr(arguments, name)]
    if arguments.workers > 1 and arguments.threads is None and arguments.engine == "embedded":
        # Together they have the cores that one alone would take.
        worker.append(f"--threads={max(1, (os.cpu_count() or 1) // arguments.workers)}")
    front_end = [f"--{name.replace('_', '-')}={value}" for name in FRONT_END_FLAGS if (value := getattr(arguments, name)) is not None]
    front_end += [f"--cors-origin={origin}" for origin in arguments.cors_origin or ()]
    keys = _api_keys(arguments, environment)
    secrets = {API_KEY_VARIABLE: ",".join(keys)} if keys else {}
    return ServeSettings(arguments.host, arguments.port, arguments.workers, arguments.grace, tuple(worker), tuple(front_end), secrets)


def worker_settings(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> WorkerSettings:
    simulator, embedded, foreign = _check_engine(arguments)
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
        foreign=foreign,
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
        max_lead=arguments.router_max_lead,
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


def _check_engine(arguments: argparse.Namespace) -> tuple[SimulatorConfig, EmbeddedSettings, ForeignSettings]:
    check_parsers(arguments.tool_parser, arguments.reasoning_parser)
    for flag in ("context_length", "max_batch", "kv_blocks", "threads", "kv_memory", "token_budget", "block_size"):
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
        block_size=arguments.block_size or simulator.block_size,
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
    return simulator, embedded, _check_foreign(arguments)


def _check_foreign(arguments: argparse.Namespace) -> ForeignSettings:
    engine = arguments.engine
    if engine in ENGINES_OF_OTHERS and arguments.model is None:
        kinds = "a directory in Hugging Face's layout, " + ("a GGUF file, " if engine == "http" else "") + "or a name on the hub"
        raise ConfigError(f"--engine {engine} needs --model, which has the tokenizer, too: {kinds}")
    for flag, owners in _OWNERS.items():
        if getattr(arguments, flag) not in (None, False, "auto") and engine not in owners:
            raise ConfigError(f"--{flag.replace('_', '-')} is for --engine {' or '.join(owners)}, not for {engine}")
    if engine == "http" and arguments.url is None:
        raise ConfigError("--engine http needs --url: that of the engine's server, such as http://127.0.0.1:30000")
    for flag, address in (("--kv-events", arguments.kv_events), ("--kv-replay", arguments.kv_replay)):
        if address is not None and "://" not in address:
            raise ConfigError(f"{flag} is {address!r}: expected an address such as tcp://127.0.0.1:5557")
    if arguments.kv_replay is not None and arguments.kv_events is None:
        raise ConfigError(f"--kv-replay is {arguments.kv_replay}, but without --kv-events nothing is read that could be missed")
    return ForeignSettings(
        engine_args=_split_words("--engine-args", arguments.engine_args or ""),
        any_version=arguments.any_engine_version,
        streaming_sessions=arguments.streaming_sessions,
        max_batch=arguments.max_batch,
        kv_memory=arguments.kv_memory,
        kv_blocks=arguments.kv_blocks,
        block_size=arguments.block_size,
        max_sessions=arguments.max_sessions,
        session_grace=arguments.session_grace,
        url=None if arguments.url is None else checked_url(arguments.url),
        route=arguments.route,
        upstream_model=arguments.upstream_model,
        kv_events=arguments.kv_events,
        kv_replay=arguments.kv_replay,
    )


_OWNERS = {
    "max_batch": ("embedded", "simulator", "vllm", "sglang"),
    "kv_blocks": ("embedded", "simulator", "vllm", "sglang"),
    # SGLang says itself what it has instead.
    "kv_memory": ("embedded", "vllm", "sglang"),
    "device": ("embedded",),
    "threads": ("embedded",),
    "token_budget": ("embedded",),
    "reproducible": ("embedded",),
    "engine_args": ("vllm", "sglang"),
    "any_engine_version": ("vllm", "sglang"),
    "streaming_sessions": ("sglang",),
    # The embedded engine's is 16.
    "block_size": ("simulator", "vllm", "sglang", "http"),
    "url": ("http",),
    "route": ("http",),
    "upstream_model": ("http",),
    "kv_events": ("http",),
    "kv_replay": ("http",),
}
"""Flags that mean something to some engines only, and would be overlooked by the others."""


def _split_words(flag: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{flag} is {text!r}: {error}") from error


def _positive(flag: str, value: Number) -> Number:
    if not value > 0:
        raise ConfigError(f"{flag} is {value}: expected more than 0")
    return value


def _not_negative(flag: str, value: Number) -> Number:
    if not value >= 0:
        raise ConfigError(f"{flag} is {value}: expected 0 or more")
    return value
