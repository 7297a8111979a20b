"""How SGLang is to be started: from Penstock's settings and the user's words to SGLang's own arguments, or why not."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

from penstock.backends.external.engine import EventEndpoints
from penstock.config.engines import EngineSettings
from penstock.wire.errors import ConfigError

OLDEST, BEFORE = (0, 5, 21), (0, 5, 24)
"""The versions whose sources were compared: everything that is used here is the same in all of them."""

INSTALL = "pip install 'sglang>=0.5.21,<0.5.24'"

MERGES_FROM = (0, 5, 10)
"""Before it, SGLang dropped all but the newest of the incremental chunks that nobody had read yet."""

DEFAULT_PAGE_SIZE = 16
"""SGLang's own is one token, which would make a KV event of every token."""

EVERYWHERE = ("*", "::", "0.0.0.0")  # noqa: S104, it is how SGLang tells an address to bind from one to connect to


class ServerArguments(Protocol):
    """SGLang's class of that name, as far as it is used."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None: ...

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any: ...


class _Parser(argparse.ArgumentParser):
    """Raises where the usual one would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--engine-args: SGLang does not take this: {message}")


def installed_version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as missing:
        raise ConfigError(f"--engine sglang needs the package sglang: {INSTALL}") from missing


def check_version(version: str, *, any_version: bool = False) -> None:
    """Raises ConfigError for a version that is not known to work."""
    if any_version or OLDEST <= numbers(version) < BEFORE:
        return
    oldest, before = (".".join(map(str, edge)) for edge in (OLDEST, BEFORE))
    raise ConfigError(
        f"SGLang {version} is installed, and what is known to work is {oldest} up to, but not including, {before}: "
        "install one of these, or try with --any-engine-version"
    )


def numbers(version: str) -> tuple[int, ...]:
    """The first three of a version: 0.5.23.post1 is a 0.5.23."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+", 1)[0])[:3])


def make_arguments(
    settings: EngineSettings, server_args: type[ServerArguments], events: EventEndpoints, version: str
) -> tuple[Any, EventEndpoints | None]:
    """SGLang's arguments, and where its KV events will be. `events` is where to have them unless the user says otherwise.

    Raises ConfigError for what SGLang does not take, for what is said twice, and for what could lose tokens.
    """
    given = _given(settings.engine_args, server_args)
    chosen = {**_defaults(given, events), **_from_settings(settings, given)}
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


def _parser(server_args: type[ServerArguments]) -> _Parser:
    parser = _Parser(prog="sglang", add_help=False)
    server_args.add_cli_args(parser)
    return parser


def _given(words: Sequence[str], server_args: type[ServerArguments]) -> dict[str, Any]:
    """What the user's words set, by the names of SGLang's fields, and nothing else."""
    parser = _parser(server_args)
    # There is no other way to tell what was given from what is the default.
    for action in parser._actions:
        action.required = False
        action.default = argparse.SUPPRESS
    return vars(parser.parse_args(list(words)))


def _from_settings(settings: EngineSettings, given: Mapping[str, Any]) -> dict[str, Any]:
    """Penstock's own flags, as SGLang's fields. What they do not set, the user's words may."""
    if settings.kv_memory is not None:
        raise ConfigError(
            f"--kv-memory is {settings.kv_memory:g}, which SGLang cannot be told: use --kv-blocks, or its own --mem-fraction-static"
        )
    page_size = settings.block_size or given.get("page_size", DEFAULT_PAGE_SIZE)
    kv_tokens = None if settings.kv_blocks is None else settings.kv_blocks * page_size
    wanted = {
        "model_path": ("--model", settings.model),
        "context_length": ("--context-length", settings.context_length),
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
    """What Penstock sets where the user does not."""
    defaults: dict[str, Any] = {
        "page_size": DEFAULT_PAGE_SIZE,
        "grammar_backend": "llguidance",
        "log_level": "warning",
    }
    if not given.get("disable_radix_cache"):
        defaults["radix_eviction_policy"] = "priority"
        defaults["kv_events_config"] = json.dumps(
            {"publisher": "zmq", "endpoint": events.publisher, "replay_endpoint": events.replay, "topic": events.topic}
        )
        # Other caches than SGLang's own do not know of sessions.
        if not any(given.get(other) for other in ("radix_cache_backend", "enable_lmcache", "enable_kv_cache_sharding")):
            defaults["enable_session_radix_cache"] = True
    return {field: value for field, value in defaults.items() if field not in given}


def _refuse(values: Mapping[str, Any], version: str) -> None:
    """Raises ConfigError, naming the flag, for what could lose or change tokens, or is not one engine behind one worker."""
    for field, expected, reason in (
        ("config", None, "SGLang's file of flags is not read: give the flags themselves"),
        ("tokenizer_worker_num", 1, "the chunks of a generation would be handed out by another process"),
        ("dp_size", 1, "start a worker for each replica: Penstock's router knows which of them has which KV"),
        ("attn_dp_size", 1, "start a worker for each replica: Penstock's router knows which of them has which KV"),
        ("enable_dp_attention", False, "start a worker for each replica: Penstock's router knows which of them has which KV"),
        ("node_rank", 0, "the worker runs on the first node; the others run SGLang itself"),
        ("allow_auto_truncate", False, "prompts would be cut without a word"),
        ("preferred_sampling_params", None, "what a request does not say would be said for it"),
        ("is_embedding", False, "nothing would be generated"),
    ):
        if values.get(field, expected) != expected:
            raise ConfigError(f"--engine-args has --{field.replace('_', '-')} {values[field]}: {reason}")
    if values.get("incremental_streaming_output") and numbers(version) < MERGES_FROM:
        raise ConfigError(
            f"--engine-args has --incremental-streaming-output, and SGLang {version} drops chunks that a busy reader has not taken: "
            "leave it out, or install a newer SGLang"
        )


def _endpoints(config: str | None) -> EventEndpoints | None:
    """Where to listen for the events of an engine that was told so; None where it publishes none, or to who listens already."""
    try:
        told = json.loads(config or "{}")
    except ValueError as error:
        raise ConfigError(f"--engine-args has --kv-events-config {config}, which is no JSON: {error}") from error
    if told.get("publisher") != "zmq":
        return None
    publisher = str(told.get("endpoint", "tcp://*:5557"))
    replay = told.get("replay_endpoint")
    is_bound = told.get("bind")
    if is_bound is None:
        is_bound = publisher.startswith("ipc://") or any(host in publisher for host in EVERYWHERE)
    if not is_bound:
        return None
    return EventEndpoints(_here(publisher), None if replay is None else _here(str(replay)), str(told.get("topic", "")))


def _here(address: str) -> str:
    """The address of a socket that listens everywhere, as it is reached from here."""
    return re.sub(r"^tcp://(\*|0\.0\.0\.0|\[?::\]?):", "tcp://127.0.0.1:", address)
