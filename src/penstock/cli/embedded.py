"""Wires the embedded engine: from a model on disk to a backend. Not in `compose`, because it imports torch."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.cli.engines import model_name
from penstock.config.commands import WorkerSettings
from penstock.config.engines import (
    CPU_IMAGE_GIB,
    CPU_KV_GIB,
    CPU_TOKEN_BUDGET,
    GIB,
    GPU_IMAGE_GIB,
    GPU_KV_SHARE,
    GPU_TOKEN_BUDGET,
    PAGE_SIZE,
    EmbeddedSettings,
    EngineConfig,
)
from penstock.config.setting import narrowed
from penstock.kv.features import SLOT_POSITIONS, slots_of
from penstock.media.families.make import read_rules
from penstock.text.formats.make import choose_formats
from penstock.text.tokenizers.source import PackedTokenizer, pack_tokenizer
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.errors import ConfigError
from penstock.wire.messages import ModelInfo
from penstock.worker.backend import Backend

try:
    import torch

    from penstock.backends.disk_tier import DiskTier
    from penstock.backends.embedded import EmbeddedBackend
    from penstock.backends.encode import EncodeBackend, yield_to_others
    from penstock.engine.checkpoints.checkpoint import Checkpoint, find_default_model, open_checkpoint
    from penstock.engine.engine import Engine
    from penstock.engine.fingerprint import image_fingerprint
    from penstock.engine.memory import release_unused
    from penstock.engine.model import Model
    from penstock.engine.shape import ModelShape, covered_length
    from penstock.engine.vision.images import EngineImages
    from penstock.engine.vision.maker import TowerMaker
    from penstock.engine.vision.shape import TowerShape
    from penstock.engine.vision.store import FeatureStore, slot_bytes
    from penstock.engine.vision.tower import make_tower
    from penstock.grammar.grammar import GrammarCompiler
except ImportError as missing:
    raise ConfigError(f"the embedded engine needs the package {missing.name!r}: pip install 'penstock[engine]'") from missing

log = logging.getLogger(__name__)


def make_embedded(settings: WorkerSettings, on_failure: Callable[[], None]) -> tuple[Backend, PackedTokenizer]:
    """Mistakes in the settings and the model's files raise ConfigError here, before anything heavy is loaded."""
    path = find_default_model() if settings.model is None else settings.model.resolve()
    checkpoint = open_checkpoint(path)
    packed = pack_tokenizer(path)
    tokenizer = packed.load()
    tool_parser, reasoning_parser = choose_formats(settings.parsers, tokenizer)
    device = _device(settings.embedded)
    trained = covered_length(checkpoint.shape)
    context_length = settings.context_length or trained
    if context_length > trained:
        log.warning(
            "--context-length %d is more than the %d tokens that the model was trained for: positions are stretched (YaRN)",
            context_length,
            trained,
        )
    _host_slots(settings.embedded, checkpoint.shape, _dtype(device))
    if checkpoint.tower is not None:
        _image_slots(settings.embedded, checkpoint.tower, context_length, device)
    pages = _known_pages(settings.embedded, checkpoint.shape, device)
    if pages is not None and pages * PAGE_SIZE < context_length:
        context_length = pages * PAGE_SIZE
        log.warning("the context is cut to %d tokens: the KV memory holds no more; see --kv-memory", context_length)
    info = ModelInfo(
        name=settings.served_name or model_name(path),
        engine="embedded",
        tokenizer=packed.fingerprint,
        vocab_size=min(tokenizer.vocab_size, checkpoint.shape.vocab_size),
        context_length=context_length,
        block_size=PAGE_SIZE,
        max_batch=settings.embedded.max_batch,
        roles=(settings.role,),
        capabilities=(
            "kv_events",
            "sessions",
            "logprobs",
            "prompt_logprobs",
            "isolation",
            *(("grammar",) if tokenizer.definition is not None else ()),
        ),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        images=None if checkpoint.tower is None else read_rules(path),
    )
    if settings.role == "encode":
        if checkpoint.tower is None:
            raise ConfigError(f"--role encode: the model {path} reads only text: expected one with a vision tower")
        return EncodeBackend(info, partial(load_encoder, checkpoint, context_length, settings.embedded, device), on_failure), packed
    backend = EmbeddedBackend(info, lambda: load_engine(checkpoint, tokenizer, context_length, settings.embedded, device), on_failure)
    return backend, packed


def load_engine(
    checkpoint: Checkpoint, tokenizer: Tokenizer, context_length: int, settings: EmbeddedSettings, device: torch.device
) -> Engine:
    dtype = _dtype(device)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    model = Model(checkpoint.shape, checkpoint.tensors(), context_length, dtype, device)
    images = None
    if checkpoint.tower is not None:
        maker = load_maker(checkpoint, context_length, settings, device)
        images = EngineImages(maker, checkpoint.tower, time.monotonic)
    budget = settings.token_budget or (CPU_TOKEN_BUDGET if device.type == "cpu" else GPU_TOKEN_BUDGET)
    pages = _known_pages(settings, checkpoint.shape, device) or _pages_in(kv_memory_left(settings, device), checkpoint.shape, dtype)
    host_slots = _host_slots(settings, checkpoint.shape, dtype)
    # On a CPU other workers read and write the pages themselves.
    staging_slots = 0 if device.type == "cpu" else min(pages, int(settings.kv_staging_memory * GIB) // _page_bytes(checkpoint.shape, dtype))
    sizes = {"kv_pages": pages, "host_slots": host_slots, "staging_slots": staging_slots}
    config = narrowed(settings, EngineConfig, context_length=context_length, token_budget=budget, **sizes)
    end_ids = checkpoint.end_ids | {tokenizer.end_id}
    vocab_size = min(tokenizer.vocab_size, checkpoint.shape.vocab_size)
    compiler = None if tokenizer.definition is None else GrammarCompiler(tokenizer.definition, vocab_size, end_ids)
    engine = Engine(config, model, end_ids, vocab_size, compiler, time.monotonic, images)
    if engine.copies is not None and host_slots:
        size = engine.copies.slots.layout.slot_bytes
        disk = settings.kv_disk
        engine.use_tiers(None if disk is None else DiskTier(disk, engine.fingerprint(), size, int(settings.kv_disk_size * GIB)))
    return engine


def load_encoder(
    checkpoint: Checkpoint, context_length: int, settings: EmbeddedSettings, device: torch.device, on_progress: Callable[[], None]
) -> TowerMaker:
    """For a worker that does nothing else. Called in the thread that encodes."""
    if device.type == "cpu":
        yield_to_others()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    maker = load_maker(checkpoint, context_length, settings, device)
    maker.on_progress = on_progress
    maker.load()
    return maker


def load_maker(checkpoint: Checkpoint, context_length: int, settings: EmbeddedSettings, device: torch.device) -> TowerMaker:
    """What makes features of images, for a model that has a tower. On a GPU it is loaded now: what is left is for KV."""
    shape, dtype = checkpoint.tower, _dtype(device)
    assert shape is not None
    store = FeatureStore(_image_slots(settings, shape, context_length, device), shape.width * shape.levels, dtype, device)
    fingerprint = image_fingerprint(shape, checkpoint.tower_tensors(), dtype)
    maker = TowerMaker(lambda: make_tower(checkpoint, dtype, device), store, fingerprint, device)
    if device.type != "cpu":
        maker.load()
    return maker


def _image_slots(settings: EmbeddedSettings, shape: TowerShape, context_length: int, device: torch.device) -> int:
    """Slots that have room for features of images. By default, no more than a prompt can use."""
    size = slot_bytes(shape.width * shape.levels, _dtype(device))
    if settings.image_memory is None:
        most = int((CPU_IMAGE_GIB if device.type == "cpu" else GPU_IMAGE_GIB) * GIB) // size
        return max(1, min(most, slots_of(context_length)))
    memory, available = int(settings.image_memory * GIB), _machine_bytes()
    if not size <= memory < available:
        raise ConfigError(
            f"--image-memory is {settings.image_memory:g} GiB: expected at least {size:,} bytes, the size of {SLOT_POSITIONS} positions, "
            f"and less than {available / GIB:.1f} GiB, the memory of this machine"
        )
    return memory // size


def _host_slots(settings: EmbeddedSettings, shape: ModelShape, dtype: torch.dtype) -> int:
    """Blocks that have room in host memory."""
    memory, most = settings.host_bytes(), _machine_bytes()
    if memory > most:
        # All of it is touched at the start. The system would kill the process.
        raise ConfigError(f"--kv-host-memory is {memory / GIB:g} GiB: expected at most {most / GIB:.1f} GiB, the memory of this machine")
    if memory and memory < _page_bytes(shape, dtype):
        raise ConfigError(
            f"--kv-host-memory is {memory / GIB:g} GiB: expected at least {_page_bytes(shape, dtype):,} bytes, the size of a KV block"
        )
    return memory // _page_bytes(shape, dtype)


def _machine_bytes() -> int:
    """The memory of this machine, or what its container may use of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        # "max" without a limit.
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def _known_pages(settings: EmbeddedSettings, shape: ModelShape, device: torch.device) -> int | None:
    """The number of KV pages; None if it depends on the memory that the weights leave on a GPU."""
    if settings.kv_blocks is not None:
        return settings.kv_blocks
    if settings.kv_memory is None and device.type != "cpu":
        return None
    return _pages_in(int((settings.kv_memory or CPU_KV_GIB) * GIB), shape, _dtype(device))


def _page_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    return 2 * shape.layers * PAGE_SIZE * shape.kv_heads * shape.head_dim * dtype.itemsize


def _pages_in(memory: int, shape: ModelShape, dtype: torch.dtype) -> int:
    page_bytes = _page_bytes(shape, dtype)
    if memory < page_bytes:
        raise ConfigError(
            f"the KV memory of {memory / GIB:.3f} GiB is too small: {PAGE_SIZE} tokens need {page_bytes:,} bytes; see --kv-memory"
        )
    return memory // page_bytes


def kv_memory_left(settings: EmbeddedSettings, device: torch.device) -> int:
    """Bytes for KV on a GPU that has the weights already. What torch keeps of the memory that loading took is given back first."""
    release_unused(device)
    free, total = torch.cuda.mem_get_info(device)
    if settings.gpu_memory_utilization is None:
        return int(free * GPU_KV_SHARE)
    return max(0, int(total * settings.gpu_memory_utilization) - (total - free))


def _dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _device(settings: EmbeddedSettings) -> torch.device:
    name = settings.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no GPU here: use --device cpu")
    if name == "cpu" and settings.gpu_memory_utilization is not None:
        raise ConfigError(
            f"--gpu-memory-utilization is {settings.gpu_memory_utilization:g}, but the model runs on a CPU: use --kv-memory GIB instead"
        )
    if settings.reproducible and name != "cpu":
        raise ConfigError("--reproducible is set, but the model runs on a GPU, which rounds by batch: use --device cpu, or leave it out")
    if settings.reproducible and not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        raise ConfigError("--reproducible is set, but this build of torch has no MKL: leave it out")
    return torch.device(name)
