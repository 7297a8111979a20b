"""The settings of every engine."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, get_args
from urllib.parse import urlsplit

from penstock.config.setting import count, seconds, setting
from penstock.wire.errors import ConfigError
from penstock.wire.messages import Role

PAGE_SIZE = 16
CPU_TOKEN_BUDGET = 512
GPU_TOKEN_BUDGET = 8192
CPU_KV_GIB = 2.0
GPU_KV_SHARE = 0.85
CPU_IMAGE_GIB = 1.0
GPU_IMAGE_GIB = 4.0
DISK_HOST_GIB = 4.0
"""KV goes to the disk and comes from there through host memory."""
GIB = 2**30
SIMULATED_TOKEN_BYTES = 128 * 1024
"""The KV of a token: keys and values of 32 layers with 8 heads of 128 numbers, 2 bytes each."""
ENGINE_KEY_VARIABLE = "PENSTOCK_ENGINE_API_KEY"
_OWN = "the engine decides"

Route = Literal["auto", "sglang", "vllm", "openai"]


def split_words(text: str) -> tuple[str, ...]:
    """Splits a text as a shell does. Raises ValueError."""
    return tuple(shlex.split(text))


def check_event_address(text: str) -> str:
    if "://" not in text:
        raise ValueError("expected an address such as tcp://127.0.0.1:5557")
    return text


TransferFault = Literal["drop", "stall", "corrupt", "kill"]


@dataclass(frozen=True)
class TransferFaults:
    """With which probability a source spoils a transfer: ends it, says nothing more, sends wrong bytes, or kills its worker."""

    drop: float = 0.0
    stall: float = 0.0
    corrupt: float = 0.0
    kill: float = 0.0
    seed: int = 0

    def by_kind(self) -> tuple[tuple[TransferFault, float], ...]:
        return ("drop", self.drop), ("stall", self.stall), ("corrupt", self.corrupt), ("kill", self.kill)

    def __str__(self) -> str:
        chances = [f"{kind}={chance:.12g}" for kind, chance in self.by_kind() if chance]
        return "transfer:" + ",".join([*chances, f"seed={self.seed}"])


@dataclass(frozen=True)
class ImageFaults:
    """With which probability an image that has come is lost, or its encoder kills the worker."""

    lose: float = 0.0
    kill: float = 0.0
    seed: int = 0

    def __str__(self) -> str:
        chances = [f"{kind}={chance:.12g}" for kind, chance in (("lose", self.lose), ("kill", self.kill)) if chance]
        return ",".join([*chances, f"seed={self.seed}"])


def parse_fault(text: str) -> TransferFaults:
    """`transfer:KIND=CHANCE,…`, and `seed=N`. Raises ValueError for other texts."""
    place, _, rest = text.partition(":")
    if place != "transfer" or not rest:
        raise ValueError("expected transfer:KIND=CHANCE,…, such as transfer:drop=0.05,stall=0.05")
    given, seed = _chances(rest, get_args(TransferFault))
    return TransferFaults(**given, seed=seed)


def parse_image_fault(text: str) -> ImageFaults:
    """`KIND=CHANCE,…`, and `seed=N`. Raises ValueError for other texts."""
    given, seed = _chances(text, ("lose", "kill"))
    return ImageFaults(**given, seed=seed)


def _chances(text: str, kinds: tuple[str, ...]) -> tuple[dict[str, float], int]:
    """The probability of each kind of fault, and the seed."""
    given: dict[str, float] = {}
    seed = 0
    for each in text.split(","):
        kind, _, value = each.partition("=")
        if kind not in (*kinds, "seed") or kind in given:
            raise ValueError(f"{each!r} is unknown or given twice: expected {', '.join(kinds)} or seed, each at most once")
        try:
            if kind == "seed":
                seed = int(value)
            else:
                given[kind] = float(value)
        except ValueError:
            raise ValueError(f"{each!r} is not a number: expected {kind}={1 if kind == 'seed' else 0.05}") from None
        if kind != "seed" and not 0 <= given[kind] <= 1:
            raise ValueError(f"{each!r} is not a probability: expected 0 to 1")
    if sum(given.values()) > 1:
        raise ValueError(f"the probabilities are {sum(given.values()):g} together: expected at most 1")
    return given, seed


# Settings that several engines have, each with its own default.
context_length_setting = partial(
    setting,
    help="most tokens of prompt and answer together. If this is more than the model was trained for, the embedded engine stretches "
    "positions (YaRN). For --engine http: required if the server does not report its context length; else it can only lower that",
    unit="TOKENS",
    minimum=1,
    aliases=("--max-model-len",),
    group="engine",
    unset="the model's own",
)
_max_batch = partial(
    setting,
    help="generations per step; further ones wait. For --engine http: how many generations the server runs at once, if it does not report "
    "that; beyond them, API keys take turns",
    unit="N",
    minimum=1,
    group="engine",
    unset=_OWN,
)
_kv_blocks = partial(setting, help="KV memory, as a number of blocks", unit="N", minimum=1, group="engine", unset="from the KV memory")
_kv_memory = partial(
    setting,
    help="KV memory per worker. SGLang takes --kv-blocks or --gpu-memory-utilization instead",
    unit="GIB",
    above=0,
    group="engine",
    unset=f"{CPU_KV_GIB:g} on a CPU; on a GPU {GPU_KV_SHARE:.0%} of the memory left beside the weights; vLLM decides itself",
)
_gpu_memory_utilization = partial(
    setting,
    help="share of the GPU's memory for weights and KV together; not for a CPU. SGLang: its --mem-fraction-static",
    unit="SHARE",
    above=0,
    maximum=1,
    group="engine",
    unset=_OWN,
)
_block_size = partial(
    setting,
    help="tokens per KV block. For --engine http: only used if the server does not report it",
    unit="TOKENS",
    minimum=1,
    group="engine",
    unset=_OWN,
)


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """What every engine has for sessions and leases."""

    lease_share: float = setting(
        0.5,
        "largest share of the KV memory, and of --kv-host-memory and --kv-disk-size each, that the leases of sessions protect",
        unit="SHARE",
        minimum=0,
        maximum=1,
        group="sessions",
    )
    max_sessions: int = count(1024, "sessions per worker; further ones get no lease", group="sessions")
    session_grace: float = seconds(30.0, "how long a worker keeps a session after its timeout, if no front end closes it", group="sessions")


@dataclass(frozen=True, kw_only=True)
class TierSettings(SessionSettings):
    """Where an engine keeps KV that its device has no room for."""

    kv_host_memory: float | None = setting(
        None,
        "host memory per worker for KV that the device has no room for",
        unit="GIB",
        above=0,
        group="engine",
        unset=f"none; {DISK_HOST_GIB:g} with --kv-disk",
    )
    kv_disk: Path | None = setting(
        None,
        "directory for KV that host memory has no room for. It survives a restart. It holds what users wrote, in the form of KV, and only "
        "the user of the worker can read it",
        unit="DIRECTORY",
        group="engine",
        unset="none",
    )
    kv_disk_size: float = setting(64.0, "most that --kv-disk holds, per worker", unit="GIB", above=0, group="engine")

    def host_bytes(self) -> int:
        """Host memory for KV; 0: none."""
        default = 0.0 if self.kv_disk is None else DISK_HOST_GIB
        return int((default if self.kv_host_memory is None else self.kv_host_memory) * GIB)


@dataclass(frozen=True)
class EmbeddedSettings(TierSettings):
    """Penstock's own engine. None: decided when the model and the device are known."""

    GROUP: ClassVar[str] = "embedded engine"
    ENGINES: ClassVar[tuple[str, ...]] = ("embedded",)

    device: str = setting("auto", "where the model runs; cpu computes in float32, cuda in bfloat16", choices=("auto", "cpu", "cuda"))
    threads: int | None = count(None, "threads per step on a CPU", minimum=1, unset="one per core, shared by the workers")
    kv_memory: float | None = _kv_memory(None)
    kv_blocks: int | None = _kv_blocks(None)
    gpu_memory_utilization: float | None = _gpu_memory_utilization(None)
    kv_staging_memory: float = setting(
        2.0,
        "pinned host memory that buffers KV between a GPU and other workers. KV without room there is computed, not moved; 0: no KV moves",
        unit="GIB",
        minimum=0,
    )
    image_memory: float | None = setting(
        None,
        "host memory for the features of images, for models that read them. If the images of a prompt need more, the prompt is computed in "
        "parts; an image that alone needs more is refused",
        unit="GIB",
        above=0,
        unset=f"as much as a prompt of --context-length tokens needs, at most {CPU_IMAGE_GIB:g} on a CPU and {GPU_IMAGE_GIB:g} on a GPU",
    )
    max_batch: int = _max_batch(256)
    token_budget: int | None = setting(
        None,
        "most tokens per step, of prompts and answers together. A small budget: a steadier stream; a large one: faster prompts",
        unit="TOKENS",
        minimum=1,
        unset=f"{CPU_TOKEN_BUDGET} on a CPU, {GPU_TOKEN_BUDGET} on a GPU",
    )
    reproducible: bool = setting(
        False,
        "round the same way for any batch, so that sampled answers never depend on other requests (Intel CPUs with AVX2; slower)",
    )


@dataclass(frozen=True)
class EngineConfig(SessionSettings):
    """The embedded engine and its KV memory, sized for a model.

    A step computes at most `token_budget` tokens, of prompts and answers together: the longer a step, the longer everybody waits for the
    next token. `reproducible`: the same rounding for any batch, as far as the matrix library can. `host_slots`: blocks of KV that have a
    place in host memory. `staging_slots`: more such places, for blocks on their way to and from other workers. Without them pages are
    written and read in place, which only a CPU can.
    """

    context_length: int
    kv_pages: int
    page_size: int = PAGE_SIZE
    max_batch: int = EmbeddedSettings.max_batch
    token_budget: int = CPU_TOKEN_BUDGET
    reproducible: bool = EmbeddedSettings.reproducible
    host_slots: int = 0
    staging_slots: int = 0


@dataclass(frozen=True)
class SimulatorConfig(TierSettings):
    """The simulator's timing: a step takes `step_ms`, and `1 / prefill_rate` seconds more for each prompt token in it.

    A block that moves takes the time of `kv_block_bytes` on its way. A worker sends one after the other, and receives one after the
    other.
    """

    GROUP: ClassVar[str] = "simulator"
    ENGINES: ClassVar[tuple[str, ...]] = ("simulator",)

    step_ms: float = setting(10.0, "time of a step, which makes one token per generation", unit="MILLISECONDS", minimum=0)
    prefill_rate: float = setting(1_000_000.0, "prompt tokens computed per second", unit="TOKENS/S", above=0)
    max_batch: int = _max_batch(8192)
    kv_blocks: int = _kv_blocks(262_144)
    prefill_budget: int = setting(8192, "most prompt tokens computed in a step", unit="TOKENS", minimum=1)
    block_size: int = _block_size(PAGE_SIZE)
    kv_block_bytes: int | None = setting(
        None,
        "size of a KV block, for the time that moving it takes; its real size is tiny",
        unit="BYTES",
        minimum=1,
        unset="128 KiB per token, as of an 8B model in bfloat16",
    )
    kv_link_gbps: float = setting(100.0, "rate of KV between workers, each way, shared by all transfers", unit="GBIT/S", above=0)
    kv_host_gbps: float = setting(200.0, "rate between the device and --kv-host-memory", unit="GBIT/S", above=0)
    kv_disk_gbps: float = setting(24.0, "rate of --kv-disk", unit="GBIT/S", above=0)
    fatal_seed: int | None = setting(None, "fault injection: a generation with this seed kills its worker", unit="SEED")
    fatal_tokens: int = count(0, "tokens that a generation with --fatal-seed makes on a worker before it kills that worker")
    fault: TransferFaults | None = setting(
        None,
        "fault injection: the probability that a transfer of KV from this worker ends (drop), stops (stall), brings wrong bytes (corrupt) "
        "or kills the worker (kill), such as transfer:drop=0.05,stall=0.05,corrupt=0.05,kill=0.01; seed=N repeats the same faults",
        unit="FAULTS",
        parse=parse_fault,
        unset="none",
    )
    images: bool = setting(False, "the model reads images: its text then depends on their pixels, too")
    encode_ms: float = setting(20.0, "time that the encoder takes for 1,000 positions of an image", unit="MILLISECONDS", minimum=0)
    image_positions: int = setting(65_536, "positions of images whose features are kept", unit="N", minimum=PAGE_SIZE)
    image_fault: ImageFaults | None = setting(
        None,
        "fault injection: the probability that an image that has arrived is lost (lose) or kills the worker (kill), such as "
        "lose=0.05,kill=0.01; seed=N repeats the same faults",
        unit="FAULTS",
        parse=parse_image_fault,
        unset="none",
    )

    @property
    def moved_block_bytes(self) -> int:
        return self.kv_block_bytes or SIMULATED_TOKEN_BYTES * self.block_size


@dataclass(frozen=True)
class EngineSettings(SessionSettings):
    """How vLLM or SGLang runs in the worker's process. None: the engine decides."""

    GROUP: ClassVar[str] = "vLLM and SGLang"
    ENGINES: ClassVar[tuple[str, ...]] = ("vllm", "sglang")

    model: str = ""
    engine_args: tuple[str, ...] = setting(
        (),
        "flags of vLLM or SGLang itself, such as --engine-args='--tensor-parallel-size 2 --dtype bfloat16'",
        unit="FLAGS",
        parse=split_words,
        is_whole=True,
    )
    context_length: int | None = context_length_setting(None)
    max_batch: int | None = _max_batch(None)
    kv_memory: float | None = _kv_memory(None)
    kv_blocks: int | None = _kv_blocks(None)
    block_size: int | None = _block_size(None)
    streaming_sessions: bool = setting(
        False,
        "SGLang: never evict the KV of sessions. A session runs one turn at a time, and only new tokens are sent to the engine",
        engines=("sglang",),
    )
    any_version: bool = setting(False, "accept a version of vLLM or SGLang that Penstock is not tested with", name="any_engine_version")
    gpu_memory_utilization: float | None = _gpu_memory_utilization(None)
    kv_patience: float = setting(
        2.0,
        "how long a prompt's KV may take to come from the engine of a prefill worker, before it is computed again",
        unit="SECONDS",
        above=0,
    )
    role: Role = "aggregated"
    kv_host: str = "127.0.0.1"


def checked_url(url: str) -> str:
    """The address of an engine's server without `/v1`, which every route adds itself. Raises ConfigError, which never shows a password."""
    if "@" in url:
        # Checked first: every other message shows the address.
        raise ConfigError(f"--url has credentials in it, which logs would show: put the key into {ENGINE_KEY_VARIABLE} instead")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"--url is not an address: {error}; expected one such as http://127.0.0.1:8000") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"--url is {url!r}: expected an address such as http://127.0.0.1:8000")
    if parts.query or parts.fragment or port == 0 or any(letter.isspace() or not letter.isprintable() for letter in url):
        # The address is not shown: a query may have a key in it.
        raise ConfigError(
            "--url has a query, a fragment, spaces or the port 0: expected an address such as http://127.0.0.1:8000; "
            f"a key goes into {ENGINE_KEY_VARIABLE}"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def check_engine_key(key: str) -> str:
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("expected visible ASCII characters, without spaces")
    return key


@dataclass(frozen=True)
class HttpEngineSettings(SessionSettings):
    """An engine that already runs behind HTTP. The key is never shown."""

    GROUP: ClassVar[str] = "engine behind HTTP"
    ENGINES: ClassVar[tuple[str, ...]] = ("http",)

    url: str = setting(
        "",
        "address of the engine's server",
        name="engine_url",
        aliases=("--url",),
        unit="URL",
        parse=checked_url,
        unset="required for --engine http",
    )
    model_name: str | None = setting(
        None, "name of the model on the engine's server", name="upstream_model", unit="NAME", unset="the only model of the server"
    )
    api_key: str | None = setting(
        None, "API key for the engine's server", name="engine_api_key", parse=check_engine_key, is_secret=True, has_flag=False
    )
    route: Route = setting("auto", "API of the engine's server to use; auto: the best that it offers", choices=get_args(Route))
    kv_events: str | None = setting(
        None, "where the engine publishes KV events, such as tcp://127.0.0.1:5557", unit="ADDRESS", parse=check_event_address
    )
    kv_replay: str | None = setting(None, "where the engine repeats KV events that were missed", unit="ADDRESS", parse=check_event_address)
    block_size: int | None = _block_size(None)
    max_batch: int | None = _max_batch(None)
    context_length: int | None = context_length_setting(None)
    connect_seconds: float = 10.0
    idle_seconds: float = 600.0
