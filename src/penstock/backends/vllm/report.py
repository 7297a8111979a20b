"""What the installed vLLM gives. It is read from the package's source, not imported: that would take half a minute."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

from penstock.backends.external.capabilities import EngineReport, Feature
from penstock.backends.vllm.arguments import check_version, installed_version, supported_range
from penstock.wire.errors import ConfigError

ENGINE = "vllm"


def report() -> EngineReport:
    found = installed_version()
    problem = None
    try:
        check_version(found)
    except ConfigError as error:
        problem = str(error)
    source = _source()
    if source is None:
        return EngineReport(ENGINE, found, supported_range(), problem or "the package vllm cannot be found")
    return EngineReport(ENGINE, found, supported_range(), problem, features_in(source, find_spec("llguidance") is not None))


def features_in(source: Path, has_llguidance: bool) -> tuple[Feature, ...]:
    """What a vLLM with this source can do."""
    generate = _parameters(source / "v1/engine/async_llm.py", "AsyncLLM", "generate")
    sampling = _fields(source / "sampling_params.py", "SamplingParams")
    publishes = "ZmqEventPublisher" in _classes(source / "distributed/kv_events.py")
    guidance = "GuidanceBackend" in _classes(source / "v1/structured_output/backend_guidance.py")
    return (
        Feature(
            "sessions",
            is_available=True,
            detail="kept and routed by Penstock; vLLM itself holds no KV for them"
            + (", and names them in its KV events" if "session_id" in generate else ""),
        ),
        Feature("KV events", publishes, "over ZMQ, with replay" if publishes else "it has no publisher"),
        Feature("logprobs", {"logprobs", "flat_logprobs"} <= sampling, "up to --max-logprobs of --engine-args, 20 by default"),
        Feature("prompt logprobs", "prompt_logprobs" in sampling, "the prompt is then computed anew, cached or not"),
        Feature("grammar", guidance and has_llguidance, _grammar_detail(guidance, has_llguidance)),
        Feature("disaggregation", is_available=False, detail="its connectors need more than the host, port and room of the prefill"),
        Feature("priority", "priority" in generate, "with --engine-args='--scheduling-policy priority'"),
    )


def _grammar_detail(guidance: bool, has_llguidance: bool) -> str:
    if not guidance:
        return "it has no structured outputs by guidance"
    return "by llguidance, for models with a fast tokenizer" if has_llguidance else "it needs the package llguidance"


def _source() -> Path | None:
    spec = find_spec("vllm")
    places = [] if spec is None else spec.submodule_search_locations or []
    return next(map(Path, places), None)


def _parameters(path: Path, class_name: str, function: str) -> set[str]:
    for node in _body(path, class_name):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            return {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    return set()


def _fields(path: Path, class_name: str) -> set[str]:
    return {node.target.id for node in _body(path, class_name) if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def _body(path: Path, class_name: str) -> list[ast.stmt]:
    for node in _module(path):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return node.body
    return []


def _classes(path: Path) -> set[str]:
    return {node.name for node in _module(path) if isinstance(node, ast.ClassDef)}


def _module(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
