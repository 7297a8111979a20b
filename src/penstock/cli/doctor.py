"""`penstock doctor`: the engines that can run here, their versions and features."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from penstock import __version__
from penstock.backends.external.engine import EngineReport, Feature
from penstock.config.engines import HttpEngineSettings
from penstock.config.resolve import resolve
from penstock.config.setting import settings_of
from penstock.wire.errors import ConfigError

EXIT_PROBLEM = 1
HTTP = "http"
_OWN_FEATURES = ("sessions", "KV events", "logprobs", "prompt logprobs", "isolation")


def add_doctor_parser(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="engines that can run here, and their features: sessions, KV events, logprobs, grammar …")
    parser.add_argument(
        "--engine",
        action="append",
        choices=[*sorted(REPORTS), HTTP],
        metavar="NAME",
        help=f"only this engine: {', '.join(sorted(REPORTS))}, or {HTTP} with --url; repeat for several (default: all)",
    )
    parser.add_argument("--url", metavar="URL", help="examine the engine behind this address, as --engine http would")
    parser.add_argument("--upstream-model", metavar="NAME", help="name of the model there (default: the only model of the server)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_doctor(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> int:
    """Returns EXIT_PROBLEM if an engine that was named has a problem."""
    names = arguments.engine or ([] if arguments.url else list(REPORTS))
    if arguments.url is None and (HTTP in names or arguments.upstream_model is not None):
        raise ConfigError(
            "--engine http and --upstream-model need --url: the address of the engine's server, such as http://127.0.0.1:30000"
        )
    reports = [REPORTS[name]() for name in names if name != HTTP]
    if arguments.url:
        reports.append(_report_http(arguments.url, arguments.upstream_model, environment))
    if arguments.json:
        print(json.dumps({"penstock": __version__, "engines": [asdict(report) for report in reports]}, indent=1))
    else:
        print("\n\n".join([f"penstock {__version__}", *map(describe, reports)]))
    was_asked_for = bool(arguments.engine or arguments.url)
    return EXIT_PROBLEM if was_asked_for and any(report.problem for report in reports) else 0


def describe(report: EngineReport) -> str:
    """A few lines for people."""
    found = report.version or "not installed"
    lines = [f"{report.engine}: {found} (supported: {report.supported})"]
    if report.problem:
        lines.append(f"  problem: {report.problem}")
    width = max((len(feature.name) for feature in report.features), default=0)
    for feature in report.features:
        mark = "yes" if feature.is_available else "no "
        lines.append(f"  {mark}  {feature.name.ljust(width)}  {feature.detail}".rstrip())
    return "\n".join(lines)


def _report_simulator() -> EngineReport:
    features = [Feature(name, is_available=True) for name in _OWN_FEATURES]
    grammar = Feature("grammar", is_available=False, detail="its tokens depend on the seed only")
    return EngineReport("simulator", __version__, "always", None, (*features, grammar, _NO_DISAGGREGATION))


def _report_embedded() -> EngineReport:
    supported = "torch 2.11 to 2.13"
    found: dict[str, str] = {}
    missing = ""
    for package in ("torch", "llguidance", "safetensors", "gguf", "numpy", "tokenizers", "jinja2"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            missing = missing or package
    if missing:
        return EngineReport("embedded", None, supported, f"it needs the package {missing!r}: pip install 'penstock[engine]'")
    features = [Feature(name, is_available=True) for name in _OWN_FEATURES]
    grammar = Feature("grammar", is_available=True, detail=f"llguidance {found['llguidance']}, for models with a tokenizer.json")
    return EngineReport("embedded", f"torch {found['torch']}", supported, None, (*features, grammar, _NO_DISAGGREGATION))


def _report_vllm() -> EngineReport:
    from penstock.backends.vllm.arguments import report

    return report()


def _report_sglang() -> EngineReport:
    from penstock.backends.sglang.arguments import report

    return report()


def _report_http(url: str, upstream_model: str | None, environment: Mapping[str, str]) -> EngineReport:
    try:
        from penstock.backends.http.engine import probe
    except ImportError as missing:
        problem = f"it needs the package {missing.name!r}: pip install 'penstock[http]'"
        return EngineReport("engine over HTTP", None, "SGLang, vLLM, or OpenAI's completions", problem)
    flags = argparse.Namespace(
        engine_url=("--url", [url]), **({"upstream_model": ("--upstream-model", [upstream_model])} if upstream_model else {})
    )
    return asyncio.run(probe(resolve(settings_of(HttpEngineSettings), flags, environment, {}).build(HttpEngineSettings)))


_NO_DISAGGREGATION = Feature("disaggregation", is_available=False, detail="prefill and decode run in one worker")

REPORTS: dict[str, Callable[[], EngineReport]] = {
    "embedded": _report_embedded,
    "simulator": _report_simulator,
    "vllm": _report_vllm,
    "sglang": _report_sglang,
}
