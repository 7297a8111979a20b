"""The settings of each command, made of those of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from penstock.config.engines import EmbeddedSettings, EngineSettings, HttpEngineSettings, SimulatorConfig, context_length_setting
from penstock.config.front_end import MIB, DispatchLimits, KeySettings, Limits, ResumeLimits, RouterSettings, StoreSettings, check_origin
from penstock.config.setting import count, seconds, setting, without_password
from penstock.wire.address import Address, parse_address
from penstock.wire.errors import ConfigError

ENGINES = ("embedded", "simulator", "vllm", "sglang", "http")
EXTERNAL_ENGINES = ("vllm", "sglang", "http")
AUTO = "auto"
NONE = "none"
TOOL_PARSERS = (
    *(AUTO, NONE, "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek_v3", "deepseek_v32", "glm45", "kimi_k2"),
    *("minimax_m2", "harmony", "gemma", "phi4", "granite", "json"),
)
REASONING_PARSERS = (AUTO, NONE, "think", "think_implied", "mistral", "granite", "harmony")


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """What a worker and a front end have in common."""

    grace: float = seconds(30.0, "how long running requests may take to finish after SIGTERM", group="server")
    secret: str = setting(
        "",
        "secret that front ends and workers share; needed for links over TCP",
        name="link_secret",
        is_secret=True,
        has_flag=False,
        group="cluster",
    )
    exit_with_parent: bool = setting(
        False, "exit when standard input ends, which happens when the parent process dies", is_forwarded=False, group="cluster"
    )


@dataclass(frozen=True)
class ParserSettings:
    """The format in which a model writes tool calls and reasoning: a name, `auto` or `none`."""

    GROUP: ClassVar[str] = "engine"

    tool: str = setting(
        AUTO,
        f"format of the model's tool calls; {AUTO}: from its chat template; {NONE}: tool calls stay text",
        name="tool_parser",
        choices=TOOL_PARSERS,
    )
    reasoning: str = setting(
        AUTO,
        f"format of the model's reasoning; {AUTO}: from its chat template; {NONE}: reasoning stays text",
        name="reasoning_parser",
        choices=REASONING_PARSERS,
    )


@dataclass(frozen=True, kw_only=True)
class FrontEndSettings(ProcessSettings):
    GROUP: ClassVar[str] = "cluster"

    stall_log: float = seconds(0.0, "log what holds the event loop for this long or longer; 0: off", group="server")
    host: str = setting("127.0.0.1", "address to listen on", unit="ADDRESS", group="server")
    port: int = setting(8000, "port to listen on; 0: any free port", unit="PORT", minimum=0, maximum=65535, group="server")
    limits: Limits
    dispatch: DispatchLimits
    router: RouterSettings
    worker_stall: float = setting(
        30.0,
        "give up a worker that has running generations and sends nothing for this long; they continue on another worker",
        unit="SECONDS",
        above=0,
        group="limits",
    )
    sessions_per_key: int = count(1024, "sessions per API key; further ones get no lease", group="sessions")
    transcript_memory: int = setting(
        256 * MIB,
        "memory for the tokens of earlier turns of sessions, so that they are not tokenized again",
        unit="MIB",
        minimum=0,
        scale=MIB,
        group="sessions",
    )
    resume: ResumeLimits
    responses: StoreSettings
    keys: KeySettings
    cors_origins: tuple[str, ...] = setting(
        (),
        "let web pages of this origin use the server, such as https://chat.example.org; repeat for several; *: all origins",
        name="cors_origin",
        unit="ORIGIN",
        parse=check_origin,
        unset="none",
        group="API keys",
    )
    store: str | None = setting(
        None,
        "Redis database that front ends share, redis://host:port/db: they find sessions and workers there",
        unit="URL",
        without_password=without_password,
        unset="in memory, for one front end",
    )
    workers: tuple[Address, ...] = setting(
        (),
        "address of a worker; repeat for several",
        name="worker",
        unit="ADDRESS",
        parse=parse_address,
        is_forwarded=False,
        unset="those in --store",
    )
    name: str = setting("frontend", "name of this process in logs and metrics", unit="NAME", is_forwarded=False)
    tokenizer: Path | None = setting(
        None,
        "model directory or GGUF file with the workers' tokenizer, if this machine has it",
        unit="PATH",
        aliases=("--model",),
        is_forwarded=False,
        unset="the tokenizer is fetched from a worker and cached",
    )

    def check(self) -> None:
        """Raises ConfigError for settings that do not fit together."""
        if self.tokenizer is not None and not self.tokenizer.exists():
            raise ConfigError(f"--tokenizer {self.tokenizer} does not exist: expected a model directory or a GGUF file")
        if not self.workers and self.store is None:
            raise ConfigError("a front end needs workers: give --worker ADDRESS, or --store where they register")
        self.keys.check()


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(ProcessSettings):
    GROUP: ClassVar[str] = "engine"

    model: Path | None = setting(
        None,
        "model directory in Hugging Face's layout; or a GGUF file (embedded, http); or a name on the Hugging Face hub (vllm, sglang, http)",
        unit="PATH",
        unset="the model that `make setup` installs; simulator: its own words; vllm, sglang, http: required",
    )
    engine: str = setting(
        "embedded",
        "what makes the tokens: Penstock's own engine, a simulator, vLLM or SGLang in the worker process, or a server that already runs",
        choices=ENGINES,
    )
    served_name: str | None = setting(
        None, "name of the model in the API", unit="NAME", aliases=("--served-model-name",), unset="the name of its file or directory"
    )
    context_length: int | None = context_length_setting(None)
    parsers: ParserSettings
    tensor_parallel_size: int = count(
        1,
        "GPUs per model. Not supported yet: only 1 is accepted. For vLLM and SGLang, use --engine-args",
        minimum=1,
        maximum=1,
        hint="Penstock's own engine runs on one GPU; for vLLM and SGLang use --engine-args='--tensor-parallel-size N'",
    )
    embedded: EmbeddedSettings
    simulator: SimulatorConfig
    external: EngineSettings
    http: HttpEngineSettings
    listen: Address | None = setting(
        None,
        "where the worker listens: unix:/path or tcp://host:port; TCP needs PENSTOCK_LINK_SECRET",
        unit="ADDRESS",
        parse=parse_address,
        is_forwarded=False,
        unset="required",
        group="cluster",
    )
    advertise: Address | None = setting(
        None,
        "address by which front ends reach the worker",
        unit="ADDRESS",
        parse=parse_address,
        is_forwarded=False,
        unset="--listen",
        group="cluster",
    )
    store: str | None = setting(
        None,
        "Redis database where front ends find this worker, redis://host:port/db",
        unit="URL",
        without_password=without_password,
        is_forwarded=False,
        unset="none",
        group="cluster",
    )
    name: str = setting("worker-0", "name of this process in logs and metrics", unit="NAME", is_forwarded=False, group="cluster")

    def check(self) -> None:
        """Raises ConfigError for settings that do not fit together."""
        if self.listen is None:
            raise ConfigError("a worker needs --listen: expected unix:/path or tcp://host:port")
        self.check_engine()

    def check_engine(self) -> None:
        if self.engine in EXTERNAL_ENGINES and self.model is None:
            kinds = "a directory in Hugging Face's layout, " + ("a GGUF file, " if self.engine == "http" else "") + "or a name on the hub"
            raise ConfigError(f"--engine {self.engine} needs --model, for the tokenizer too: {kinds}")
        if self.engine == "http" and not self.http.url:
            raise ConfigError("--engine http needs --url: the address of the engine's server, such as http://127.0.0.1:30000")
        if self.http.kv_replay is not None and self.http.kv_events is None:
            raise ConfigError(f"--kv-replay is {self.http.kv_replay}; it also needs --kv-events")
        engine = self.embedded if self.engine == "embedded" else self.external
        if engine.gpu_memory_utilization is not None and (engine.kv_memory is not None or engine.kv_blocks is not None):
            raise ConfigError("--gpu-memory-utilization, --kv-memory and --kv-blocks all size the KV memory: give one of them")


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """One front end and its workers on this machine."""

    front_end: FrontEndSettings
    worker: WorkerSettings
    workers: int = count(1, "worker processes to start", minimum=1, group="server")

    def check(self) -> None:
        """Raises ConfigError for settings that do not fit together."""
        self.front_end.keys.check()
        self.worker.check_engine()


COMMANDS: dict[str, type] = {"serve": ServeSettings, "worker": WorkerSettings, "frontend": FrontEndSettings}
"""The commands that take settings."""
