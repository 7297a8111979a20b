"""Wires the engine that the settings name: from a model to a backend."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import structs

from penstock.backends.encode import EncodeBackend
from penstock.backends.external.backend import EventFeed, ExternalBackend
from penstock.backends.external.engine import EventEndpoints, ExternalEngine
from penstock.backends.external.images import Placeholder
from penstock.backends.simulated_images import SimulatedTower
from penstock.backends.simulator import Simulator, Vocabulary
from penstock.config.commands import WorkerSettings
from penstock.config.engines import EngineSettings
from penstock.grammar.compile_queue import CompileQueue
from penstock.media.families.make import read_rules
from penstock.media.families.simulator import make_rules
from penstock.text.formats.make import choose_formats
from penstock.text.tokenizers.model_settings import read_end_ids, read_image_token, read_vocab_size
from penstock.text.tokenizers.source import PackedTokenizer, pack_tokenizer
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.address import TcpAddress
from penstock.wire.errors import ConfigError
from penstock.wire.images import ImageRules
from penstock.wire.messages import KvEvents, ModelInfo
from penstock.worker.backend import Backend

log = logging.getLogger(__name__)

SIMULATED_CONTEXT = 131_072
# Until the engine runs and reports its own.
UNKNOWN = 1
_QUANTIZATION = re.compile(r"[.-](I?Q\d\w*|F16|F32|BF16)$", re.IGNORECASE)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def make_backend(settings: WorkerSettings, on_failure: Callable[[], None]) -> tuple[Backend, PackedTokenizer]:
    """The engine that the settings name, and the tokenizer of its model. Raises ConfigError before anything heavy is loaded."""
    match settings.engine:
        case "embedded":
            if settings.embedded.reproducible:
                # Before the matrix library is loaded.
                rounding = os.environ.setdefault("MKL_CBWR", equal_rounding(_cpu_info()))
                if not rounding.endswith(",STRICT"):
                    raise ConfigError(f"MKL_CBWR is {rounding!r}, but --reproducible needs AVX2,STRICT or AVX512,STRICT: unset it")
            # torch is heavy, and an extra.
            from penstock.cli.embedded import make_embedded

            return make_embedded(settings, on_failure)
        case "simulator":
            return _make_simulator(settings, on_failure)
        case _:
            return make_external(settings, on_failure)


def equal_rounding(cpu_info: str) -> str:
    """What tells MKL to round a row the same way whatever rows are computed with it. Raises ConfigError where MKL does not promise that."""
    flags = f" {cpu_info.partition('flags')[2].partition(chr(10))[0]} "
    if "GenuineIntel" not in cpu_info or " avx2 " not in flags:
        name = re.search(r"model name\s*: (.+)", cpu_info)
        found = f"this is {name[1]}" if name else "this one is unknown"
        raise ConfigError(f"--reproducible works on Intel CPUs with AVX2 or AVX-512 only, and {found}: leave it out")
    return "AVX512,STRICT" if " avx512f " in flags else "AVX2,STRICT"


def _cpu_info() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _make_simulator(settings: WorkerSettings, on_failure: Callable[[], None]) -> tuple[Backend, PackedTokenizer]:
    packed = pack_tokenizer(settings.model)
    tokenizer = packed.load()
    tool_parser, reasoning_parser = choose_formats(settings.parsers, tokenizer)
    model = ModelInfo(
        name=settings.served_name or (settings.model.resolve().name if settings.model is not None else settings.engine),
        engine=settings.engine,
        tokenizer=packed.fingerprint,
        vocab_size=tokenizer.vocab_size,
        context_length=settings.context_length or SIMULATED_CONTEXT,
        block_size=settings.simulator.block_size,
        max_batch=settings.simulator.max_batch,
        roles=(settings.role,),
        capabilities=("kv_events", "sessions", "logprobs", "prompt_logprobs", "isolation"),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        images=make_rules() if settings.simulator.images else None,
    )
    if settings.role == "encode":
        if model.images is None:
            raise ConfigError("--role encode and --engine simulator: the model reads no images; give --images")
        return EncodeBackend(model, partial(SimulatedTower, settings.simulator, model.images), on_failure), packed
    vocabulary = Vocabulary(tuple(tokenizer.ordinary_ids), tokenizer.end_id)
    return Simulator(settings.simulator, model, vocabulary, on_failure=on_failure), packed


def make_external(settings: WorkerSettings, on_failure: Callable[[], None]) -> tuple[Backend, PackedTokenizer]:
    """vLLM, SGLang, or a server behind HTTP."""
    assert settings.model is not None
    # Only the tokenizer is read here. A server behind HTTP has its own model, so a GGUF file is enough.
    path = find_model(settings.model, takes_gguf=settings.engine == "http")
    packed = pack_tokenizer(path)
    tokenizer = packed.load()
    vocab_size, end_ids = tokenizer.vocab_size, frozenset({tokenizer.end_id})
    if path.is_dir():
        vocab_size = min(vocab_size, read_vocab_size(path) or vocab_size)
        end_ids |= read_end_ids(path)
    rules, placeholder = find_images(path, tokenizer) if path.is_dir() else (None, None)
    engine = _make_engine(settings, path, tokenizer, placeholder)
    grammars = _make_grammars(tokenizer, vocab_size, end_ids)
    tool_parser, reasoning_parser = choose_formats(settings.parsers, tokenizer)
    model = ModelInfo(
        name=settings.served_name or (model_name(path) if settings.model.exists() else settings.model.name),
        engine=settings.engine,
        tokenizer=packed.fingerprint,
        vocab_size=vocab_size,
        context_length=settings.context_length or UNKNOWN,
        block_size=UNKNOWN,
        roles=(settings.role,),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        images=rules,
    )
    limits = settings.external
    backend = ExternalBackend(
        model,
        engine,
        grammars,
        make_feed,
        on_failure,
        max_sessions=limits.max_sessions,
        session_grace=limits.session_grace,
        kv_patience=limits.kv_patience,
        placeholder=placeholder,
    )
    return backend, packed


def find_images(directory: Path, tokenizer: Tokenizer) -> tuple[ImageRules | None, Placeholder | None]:
    """How the model wants its images, if it reads any, and what stands for one in the prompts of vLLM and SGLang. If the model's files do
    not agree on that, images are refused and text works."""
    try:
        rules = read_rules(directory)
    except ConfigError as error:
        log.warning("images are off: %s", error)
        return None, None
    if rules is None:
        return None, None
    position, ids = read_image_token(directory), tuple(tokenizer.encode_part(rules.placeholder))
    if position is None or ids.count(position) != 1:
        log.warning("images are off: %r, which stands for an image, has the tokens %s: expected one %s", rules.placeholder, ids, position)
        return None, None
    # The engine has a processor of its own.
    return structs.replace(rules, is_prepared=False), Placeholder(ids, position)


def _make_engine(settings: WorkerSettings, directory: Path, tokenizer: Tokenizer, placeholder: Placeholder | None) -> ExternalEngine:
    in_process = replace(settings.external, model=str(directory), role=settings.role, kv_host=_kv_host(settings))
    match settings.engine:
        case "vllm":
            from penstock.backends.vllm.engine import VllmEngine

            return VllmEngine(in_process, placeholder)
        case "sglang":
            from penstock.backends.sglang.engine import SglangEngine

            return SglangEngine(in_process, placeholder)
        case _:
            try:
                from penstock.backends.http.engine import HttpEngine
            except ImportError as missing:
                raise ConfigError(f"--engine http needs the package {missing.name!r}: pip install 'penstock[http]'") from missing
            return HttpEngine(settings.http, tokenizer, placeholder)


def _kv_host(settings: WorkerSettings) -> str:
    """Where the engines of other workers reach this worker's engine."""
    address = settings.advertise or settings.listen
    return address.host if isinstance(address, TcpAddress) else EngineSettings.kv_host


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


def make_feed(endpoints: EventEndpoints, block_size: int, on_events: Callable[[KvEvents], None]) -> EventFeed:
    try:
        from penstock.backends.external.zmq_events import KvEventFeed
    except ImportError as missing:
        raise ConfigError(f"the KV events of an engine need the package {missing.name!r}: pip install pyzmq") from missing
    return KvEventFeed(endpoints, block_size, on_events)


# Which model `--model` means, and what it is called.


def model_name(path: Path) -> str:
    """The name of the file or directory, without its suffix and quantization."""
    return path.name if path.is_dir() else _QUANTIZATION.sub("", path.stem)


def find_model(model: Path, *, takes_gguf: bool = False) -> Path:
    """The directory or file itself, or where the hub's library has put the model of this name. Raises ConfigError."""
    if model.is_dir() or (takes_gguf and model.is_file() and model.suffix == ".gguf"):
        return model.resolve()
    if model.exists() or not _HUB_NAME.fullmatch(str(model)):
        what = "is a file" if model.exists() else "does not exist"
        or_gguf = ", a GGUF file" if takes_gguf else ""
        raise ConfigError(f"--model {model} {what}: expected a directory in Hugging Face's layout{or_gguf}, or a model's name there")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(model)))
    except ImportError as missing:
        raise ConfigError(
            f"--model {model} is not a directory, and fetching it from the hub needs the package {missing.name!r}"
        ) from missing
    except (OSError, ValueError) as error:
        # The library raises nothing else.
        first_line = str(error).strip().split("\n", 1)[0]
        raise ConfigError(f"--model {model} is not a directory, and could not be fetched from the hub: {first_line}") from error
