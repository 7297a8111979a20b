"""Wires the engines of others: vLLM, SGLang, and whatever already runs behind HTTP."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from penstock.backends.external.backend import EventFeed, ExternalBackend
from penstock.backends.external.engine import EventEndpoints, ExternalEngine
from penstock.backends.http.settings import HttpEngineSettings, api_key_from
from penstock.cli.models import find_model, model_name
from penstock.cli.settings import WorkerSettings
from penstock.config.engines import EngineSettings
from penstock.grammar.compile_queue import CompileQueue
from penstock.text.tokenizers.model_settings import read_end_ids, read_vocab_size
from penstock.text.tokenizers.source import PackedTokenizer, pack_tokenizer
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.messages import KvEvents, ModelInfo
from penstock.worker.backend import Backend

log = logging.getLogger(__name__)

# Stands for what is known when the engine runs.
UNKNOWN = 1


def make_external(settings: WorkerSettings, on_failure: Callable[[], None]) -> tuple[Backend, PackedTokenizer]:
    """What is wrong with the model's files or the settings is told here, before anything heavy is loaded."""
    assert settings.model is not None
    # Only the tokenizer is read here, so any model file will do where the engine has its own.
    path = find_model(settings.model, takes_gguf=settings.engine == "http")
    packed = pack_tokenizer(path)
    tokenizer = packed.load()
    vocab_size, end_ids = tokenizer.vocab_size, frozenset({tokenizer.end_id})
    if path.is_dir():
        vocab_size = min(vocab_size, read_vocab_size(path) or vocab_size)
        end_ids |= read_end_ids(path)
    engine = _make_engine(settings, path, tokenizer)
    grammars = _make_grammars(tokenizer, vocab_size, end_ids)
    tool_parser, reasoning_parser = settings.parsers.resolve(tokenizer)
    model = ModelInfo(
        name=settings.served_name or (model_name(path) if settings.model.exists() else settings.model.name),
        engine=settings.engine,
        tokenizer=packed.fingerprint,
        vocab_size=vocab_size,
        context_length=settings.context_length or UNKNOWN,
        block_size=UNKNOWN,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )
    foreign = settings.foreign
    backend = ExternalBackend(
        model, engine, grammars, _make_feed, on_failure, max_sessions=foreign.max_sessions, session_grace=foreign.session_grace
    )
    return backend, packed


def _make_engine(settings: WorkerSettings, directory: Path, tokenizer: Tokenizer) -> ExternalEngine:
    match settings.engine:
        case "vllm":
            from penstock.backends.vllm.engine import VllmEngine

            return VllmEngine(_engine_settings(settings, directory))
        case "sglang":
            from penstock.backends.sglang.engine import SglangEngine

            return SglangEngine(_engine_settings(settings, directory))
        case _:
            from penstock.backends.http.engine import HttpEngine

            return HttpEngine(_http_settings(settings), tokenizer)


def _engine_settings(settings: WorkerSettings, directory: Path) -> EngineSettings:
    foreign = settings.foreign
    return EngineSettings(
        model=str(directory),
        engine_args=foreign.engine_args,
        context_length=settings.context_length,
        max_batch=foreign.max_batch,
        kv_memory=foreign.kv_memory,
        kv_blocks=foreign.kv_blocks,
        block_size=foreign.block_size,
        streaming_sessions=foreign.streaming_sessions,
        any_version=foreign.any_version,
    )


def _http_settings(settings: WorkerSettings) -> HttpEngineSettings:
    foreign = settings.foreign
    assert foreign.url is not None
    return HttpEngineSettings(
        url=foreign.url,
        model_name=foreign.upstream_model,
        api_key=api_key_from(os.environ),
        route=foreign.route,
        events=None if foreign.kv_events is None else EventEndpoints(foreign.kv_events, foreign.kv_replay),
        block_size=foreign.block_size,
        context_length=settings.context_length,
    )


def _make_grammars(tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> CompileQueue[str] | None:
    if tokenizer.definition is None:
        log.warning("structured output is off: the model's tokenizer has no tokenizer.json")
        return None
    try:
        from penstock.grammar.grammar import GrammarCompiler
    except ImportError as missing:
        log.warning("structured output is off: it needs the package %r", missing.name)
        return None
    return CompileQueue(GrammarCompiler(tokenizer.definition, vocab_size, end_ids).lark)


def _make_feed(endpoints: EventEndpoints, block_size: int, on_events: Callable[[KvEvents], None]) -> EventFeed:
    from penstock.backends.external.zmq_events import KvEventFeed

    return KvEventFeed(endpoints, block_size, on_events)
