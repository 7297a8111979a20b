"""What the SGLang that is installed gives. It is imported for that, and not started."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from importlib import import_module

from penstock.backends.external.capabilities import EngineReport, Feature
from penstock.backends.sglang.arguments import BEFORE, MERGES_FROM, OLDEST, check_version, installed_version, numbers
from penstock.wire.errors import ConfigError

SUPPORTED = " up to, but not including, ".join(".".join(map(str, edge)) for edge in (OLDEST, BEFORE))


def report() -> EngineReport:
    try:
        version = installed_version()
    except ConfigError as error:
        return EngineReport("sglang", None, SUPPORTED, str(error))
    problem = None
    try:
        check_version(version)
    except ConfigError as error:
        problem = str(error)
    try:
        flags = _flags()
        parameters = inspect.signature(import_module("sglang.srt.entrypoints.engine").Engine.async_generate).parameters
    except Exception as error:  # noqa: BLE001, whatever its import comes to is what there is to tell
        return EngineReport("sglang", version, SUPPORTED, f"it cannot be imported: {type(error).__name__}: {error}")
    return EngineReport("sglang", version, SUPPORTED, problem, _features(version, flags, parameters))


def _flags() -> Collection[str]:
    """The fields of SGLang's server arguments, which are a msgspec struct, or a dataclass in older versions."""
    server_args = import_module("sglang.srt.server_args").ServerArgs
    fields: Collection[str] = getattr(server_args, "__struct_fields__", None) or server_args.__dataclass_fields__
    return fields


def _features(version: str, flags: Collection[str], parameters: Collection[str]) -> tuple[Feature, ...]:
    tags = "enable_session_radix_cache" in flags and "session_id" in parameters
    return (
        Feature(
            "sessions",
            tags,
            "the KV of an open session goes after all other KV" if tags else "this version does not know which KV is a session's",
        ),
        Feature("streaming sessions", "enable_streaming_session" in flags, "--streaming-sessions: KV that is held, one turn at a time"),
        Feature(
            "priority",
            "radix_eviction_policy" in flags and "priority" in parameters,
            "what has the lower priority, or is not to be retained, goes first",
        ),
        Feature("KV events", "kv_events_config" in flags, "over ZMQ, with what was missed asked for again"),
        Feature("logprobs", "top_logprobs_num" in parameters, "of tokens and alternatives"),
        Feature("prompt logprobs", "logprob_start_len" in parameters, "a prompt that they are wanted of is computed anew"),
        Feature("grammar", "grammar_backend" in flags, "by llguidance; not with --skip-tokenizer-init"),
        Feature("incremental output", numbers(version) >= MERGES_FROM, "--incremental-streaming-output; cumulative output always works"),
        Feature("seeds", "enable_deterministic_inference" in flags, "only with --enable-deterministic-inference"),
        Feature(
            "disaggregation",
            "disaggregation_mode" in flags and "bootstrap_room" in parameters,
            "with --disaggregation-mode prefill or decode",
        ),
    )
