"""The installed SGLang: its version, what it can do, and the arguments that it runs with."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

from penstock.backends.external.engine import EngineReport, EventEndpoints, Feature
from penstock.backends.external.in_process import EnginePackage, free_port, version_numbers
from penstock.config.engines import EngineSettings
from penstock.wire.errors import ConfigError

PACKAGE = EnginePackage(
    name="sglang",
    title="SGLang",
    # The sources of these versions were compared: everything that is used here is the same in all of them.
    oldest=(0, 5, 21),
    before=(0, 5, 24),
    distributions=("sglang",),
    logger="sglang",
    # It logs little else than why its process fails. Other loggers report every grammar that does not compile.
    failure_logger="sglang.srt.managers.scheduler",
    log_variable="SGLANG_LOGGING_CONFIG_PATH",
)

MERGES_FROM = (0, 5, 10)
"""Older versions drop all unread incremental chunks except the newest."""

DEFAULT_PAGE_SIZE = 16
"""SGLang's own default is one token, which makes one KV event per token."""

EVERYWHERE = ("*", "::", "0.0.0.0")  # noqa: S104, SGLang binds these addresses and connects to others


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--engine-args: SGLang does not take this: {message}")


def make_arguments(settings: EngineSettings, server_args: Any, events: EventEndpoints, version: str) -> tuple[Any, EventEndpoints | None]:
    """SGLang's arguments, and the addresses of its KV events: `events`, unless the user gives others. `server_args` is SGLang's class.

    Raises ConfigError for arguments that SGLang rejects, that are given twice, or that could lose tokens.
    """
    given = _given(settings.engine_args, server_args)
    chosen = {**_defaults(given, events), **_role(settings, given), **_from_settings(settings, given)}
    values = {**given, **chosen}
    _refuse(values, version)
    parser = _parser(server_args)
    namespace = parser.parse_args(["--model-path", settings.model, *settings.engine_args])
    for name, value in chosen.items():
        setattr(namespace, name, value)
    try:
        made = server_args.from_cli_args(namespace)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"--engine-args: SGLang does not take this: {error}") from error
    return made, _endpoints(values.get("kv_events_config"))


def _parser(server_args: Any) -> _Parser:
    parser = _Parser(prog="sglang", add_help=False)
    server_args.add_cli_args(parser)
    return parser


def _given(words: Sequence[str], server_args: Any) -> dict[str, Any]:
    """The fields of SGLang's arguments that the user sets, without any defaults."""
    parser = _parser(server_args)
    # argparse has no other way to tell given values from defaults.
    for action in parser._actions:
        action.required = False
        action.default = argparse.SUPPRESS
    return vars(parser.parse_args(list(words)))


def _from_settings(settings: EngineSettings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Penstock's own flags as fields of SGLang's arguments."""
    if settings.kv_memory is not None:
        raise ConfigError(
            f"--kv-memory is {settings.kv_memory:g}, but SGLang has no such setting: use --kv-blocks or --gpu-memory-utilization"
        )
    page_size = settings.block_size or given.get("page_size", DEFAULT_PAGE_SIZE)
    kv_tokens = None if settings.kv_blocks is None else settings.kv_blocks * page_size
    wanted = {
        "model_path": ("--model", settings.model),
        "context_length": ("--context-length", settings.context_length),
        "mem_fraction_static": ("--gpu-memory-utilization", settings.gpu_memory_utilization),
        "max_running_requests": ("--max-batch", settings.max_batch),
        "max_total_tokens": ("--kv-blocks", kv_tokens),
        "page_size": ("--block-size", settings.block_size),
        "enable_streaming_session": ("--streaming-sessions", settings.streaming_sessions or None),
    }
    for field, (flag, value) in wanted.items():
        if value is not None and field in given:
            raise ConfigError(f"{flag} and --engine-args both set SGLang's {field}: leave one of them out")
    return {field: value for field, (_, value) in wanted.items() if value is not None}


def _defaults(given: Mapping[str, Any], events: EventEndpoints) -> dict[str, Any]:
    """What Penstock sets unless the user does."""
    defaults: dict[str, Any] = {"page_size": DEFAULT_PAGE_SIZE, "grammar_backend": "llguidance", "log_level": "warning"}
    if not given.get("disable_radix_cache"):
        defaults["radix_eviction_policy"] = "priority"
        defaults["kv_events_config"] = json.dumps(
            {"publisher": "zmq", "endpoint": events.publisher, "replay_endpoint": events.replay, "topic": events.topic}
        )
        # Only SGLang's own cache knows sessions.
        if not any(given.get(other) for other in ("radix_cache_backend", "enable_lmcache", "enable_kv_cache_sharding")):
            defaults["enable_session_radix_cache"] = True
    return {field: value for field, value in defaults.items() if field not in given}


def _role(settings: EngineSettings, given: Mapping[str, Any]) -> dict[str, Any]:
    """What makes it one half of a pair: one computes prompts, the other continues them."""
    if settings.role == "aggregated":
        return {}
    wanted: dict[str, Any] = {"disaggregation_mode": settings.role, "disaggregation_transfer_backend": "nixl"}
    if settings.role == "prefill":
        # Where the other half asks for it.
        wanted |= {"host": settings.kv_host, "disaggregation_bootstrap_port": free_port(settings.kv_host)}
    if given.get("disaggregation_mode", settings.role) != settings.role:
        raise ConfigError(
            f"--role is {settings.role} and --engine-args has --disaggregation-mode {given['disaggregation_mode']}: leave that out"
        )
    return {field: value for field, value in wanted.items() if field not in given}


def _refuse(values: Mapping[str, Any], version: str) -> None:
    """Raises ConfigError for flags that could lose or change tokens, or that run more than one engine per worker."""
    one_replica = "start one worker per replica instead: the router knows which worker has which KV"
    for field, expected, reason in (
        ("config", None, "SGLang's configuration file is not read: give the flags themselves"),
        ("tokenizer_worker_num", 1, "another process would receive the chunks of a generation"),
        ("dp_size", 1, one_replica),
        ("attn_dp_size", 1, one_replica),
        ("enable_dp_attention", False, one_replica),
        ("node_rank", 0, "the worker runs on the first node; run SGLang itself on the others"),
        ("allow_auto_truncate", False, "SGLang would silently shorten prompts"),
        ("preferred_sampling_params", None, "SGLang would change the sampling of requests"),
        ("is_embedding", False, "SGLang would generate no text"),
    ):
        if values.get(field, expected) != expected:
            raise ConfigError(f"--engine-args has --{field.replace('_', '-')} {values[field]}: {reason}")
    if values.get("incremental_streaming_output") and version_numbers(version) < MERGES_FROM:
        raise ConfigError(
            f"--engine-args has --incremental-streaming-output, but SGLang {version} drops chunks that a busy reader has not read: "
            "leave it out, or install a newer SGLang"
        )


def _endpoints(config: str | None) -> EventEndpoints | None:
    """Where to read the events of this configuration. None if SGLang publishes none, or connects to a listener instead of binding."""
    try:
        decoded = json.loads(config or "{}")
    except ValueError as error:
        raise ConfigError(f"--engine-args has --kv-events-config {config}, which is not JSON: {error}") from error
    if decoded.get("publisher") != "zmq":
        return None
    publisher = str(decoded.get("endpoint", "tcp://*:5557"))
    replay = decoded.get("replay_endpoint")
    is_bound = decoded.get("bind")
    if is_bound is None:
        is_bound = publisher.startswith("ipc://") or any(host in publisher for host in EVERYWHERE)
    if not is_bound:
        return None
    return EventEndpoints(_here(publisher), None if replay is None else _here(str(replay)), str(decoded.get("topic", "")))


def _here(address: str) -> str:
    """The address of a bound socket, as this machine reaches it."""
    return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[?::\]?):", "tcp://127.0.0.1:", address)


def report() -> EngineReport:
    """What the installed SGLang can do. It is imported, not started."""
    version = PACKAGE.version()
    problem = PACKAGE.problem(version)
    if version is None:
        return EngineReport(PACKAGE.name, None, PACKAGE.supported, problem)
    try:
        server_args = import_module("sglang.srt.server_args").ServerArgs
        # A msgspec struct, or a dataclass in older versions.
        flags = getattr(server_args, "__struct_fields__", None) or server_args.__dataclass_fields__
        parameters = inspect.signature(import_module("sglang.srt.entrypoints.engine").Engine.async_generate).parameters
    except Exception as error:  # noqa: BLE001, any failure of the import is reported
        return EngineReport(PACKAGE.name, version, PACKAGE.supported, f"it cannot be imported: {type(error).__name__}: {error}")
    return EngineReport(PACKAGE.name, version, PACKAGE.supported, problem, _features(version, flags, parameters))


def _features(version: str, flags: Collection[str], parameters: Collection[str]) -> tuple[Feature, ...]:
    tags = "enable_session_radix_cache" in flags and "session_id" in parameters
    has_priority = "radix_eviction_policy" in flags and "priority" in parameters
    is_disaggregated = "disaggregation_mode" in flags and "bootstrap_room" in parameters
    return (
        Feature("sessions", tags, "the KV of an open session is evicted last" if tags else "this version does not tag KV with its session"),
        Feature("streaming sessions", "enable_streaming_session" in flags, "--streaming-sessions: KV is held; one turn at a time"),
        Feature("priority", has_priority, "KV with low priority or without retention is evicted first"),
        Feature("KV events", "kv_events_config" in flags, "over ZMQ, with replay"),
        Feature("logprobs", "top_logprobs_num" in parameters, "of tokens and alternatives"),
        Feature("prompt logprobs", "logprob_start_len" in parameters, "such a prompt is always computed from its start"),
        Feature("grammar", "grammar_backend" in flags, "by llguidance; not with --skip-tokenizer-init"),
        Feature("isolation", "cache_salt" in parameters, "API keys share no KV, by its cache_salt"),
        Feature("incremental output", version_numbers(version) >= MERGES_FROM, "--incremental-streaming-output; cumulative always works"),
        Feature("seeds", "enable_deterministic_inference" in flags, "only with --enable-deterministic-inference"),
        Feature("disaggregation", is_disaggregated, "--role, by its nixl backend, or another of --disaggregation-transfer-backend"),
    )
