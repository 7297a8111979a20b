"""The settings of each command, made of those of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, get_args
from urllib.parse import urlsplit

from penstock.config.engines import EmbeddedSettings, EngineSettings, HttpEngineSettings, SimulatorConfig, context_length_setting
from penstock.config.front_end import (
    MIB,
    DispatchLimits,
    Key,
    KeySettings,
    Limits,
    ResumeLimits,
    RouterSettings,
    StoreSettings,
    check_host,
    check_origin,
    read_key,
)
from penstock.config.media import MediaSettings
from penstock.config.setting import count, seconds, setting, without_password
from penstock.wire.address import Address, TcpAddress, is_loopback, parse_address, parse_listener
from penstock.wire.errors import ConfigError
from penstock.wire.messages import Role

USE_LINK_TLS = "give --link-tls-cert, --link-tls-key and --link-tls-ca, or keep them on a network that you trust"
ENGINES = ("embedded", "simulator", "vllm", "sglang", "http")
EXTERNAL_ENGINES = ("vllm", "sglang", "http")
AUTO = "auto"
NONE = "none"
TOOL_PARSERS = (
    *(AUTO, NONE, "hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek_v3", "deepseek_v32", "glm45", "kimi_k2"),
    *("minimax_m2", "harmony", "gemma", "phi4", "granite", "json"),
)
REASONING_PARSERS = (AUTO, NONE, "think", "think_implied", "mistral", "granite", "harmony")


def unencrypted_store(url: str | None) -> list[str]:
    parts = urlsplit(url or "")
    if parts.scheme != "redis" or is_loopback(parts.hostname or "localhost"):
        return []
    return [f"names of sessions and addresses of workers in --store {without_password(url or '')}: use rediss://"]


@dataclass(frozen=True)
class LinkTlsSettings:
    """The files of TLS on links over TCP: all of them, or none."""

    GROUP: ClassVar[str] = "cluster"

    cert: Path | None = setting(
        None,
        "PEM file with the certificate of this process, for TLS on links over TCP. A worker's certificate names the host of its address. "
        "Needs --link-tls-key and --link-tls-ca",
        name="link_tls_cert",
        unit="PATH",
        unset="no TLS",
    )
    key: Path | None = setting(None, "private key of the certificate, in PEM", name="link_tls_key", unit="PATH", unset="no TLS")
    ca: Path | None = setting(
        None, "PEM file with the CA certificates that sign the other side's certificate", name="link_tls_ca", unit="PATH", unset="no TLS"
    )

    def check(self) -> None:
        """Raises ConfigError if some are given and others are not."""
        given = {f"--link-tls-{name}": value for name, value in vars(self).items()}
        missing = [flag for flag, value in given.items() if value is None]
        if 0 < len(missing) < len(given):
            present = next(f"{flag} {value}" for flag, value in given.items() if value is not None)
            raise ConfigError(f"{present} needs {' and '.join(missing)}: both ends of a link show a certificate and check the other's")


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """What a worker and a front end have in common."""

    grace: float = seconds(30.0, "how long running requests may take to finish after SIGTERM", group="server")
    secret: str = setting(
        "",
        "secret that front ends and workers share; links over TCP need it, or TLS, or both",
        name="link_secret",
        is_secret=True,
        has_flag=False,
        group="cluster",
    )
    link_tls: LinkTlsSettings
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
    media: MediaSettings
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
    metrics_address: TcpAddress | None = setting(
        None,
        "serve /metrics at this address, host:port, and no longer at --port. It then includes the metrics of each API key",
        unit="ADDRESS",
        parse=parse_listener,
        unset="/metrics is at --port, and includes the metrics of each key only if PENSTOCK_METRICS_KEY is set",
        group="server",
    )
    metrics_key: Key | None = setting(
        None,
        "key that /metrics needs, for Prometheus; no other key opens it, and it opens nothing else",
        parse=read_key,
        is_secret=True,
        has_flag=False,
        unset="/metrics needs no key",
        group="server",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "name by which clients may reach a server without keys, such as gpu1.example.org; repeat for several; *: any name, which lets web "
        "pages use the server through their visitors' browsers. Addresses and localhost are always allowed",
        name="allowed_host",
        unit="NAME",
        parse=check_host,
        unset="--host; and if others can reach it, the machine's own name",
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
        self.link_tls.check()
        for address in self.workers:
            if isinstance(address, TcpAddress) and not self.secret and self.link_tls.cert is None:
                raise ConfigError(f"--worker {address}: a link over TCP needs PENSTOCK_LINK_SECRET or TLS (--link-tls-cert)")
        self.keys.check()

    def unencrypted(self) -> list[str]:
        """What others on the network can read."""
        found = [] if is_loopback(self.host) else [f"HTTP on --host {self.host}, keys included: put a proxy with TLS in front"]
        if self.metrics_address is not None and not is_loopback(self.metrics_address.host):
            found.append(f"metrics with the names of API keys on --metrics-address {str(self.metrics_address).removeprefix('tcp://')}")
        open_links = [str(each) for each in self.workers if isinstance(each, TcpAddress) and not is_loopback(each.host)]
        if open_links and self.link_tls.cert is None:
            found.append(f"prompts and answers on the links to {', '.join(open_links)}: {USE_LINK_TLS}")
        return found + unencrypted_store(self.store)


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
        "where the worker listens: unix:/path or tcp://host:port; TCP needs TLS or PENSTOCK_LINK_SECRET",
        unit="ADDRESS",
        parse=parse_address,
        is_forwarded=False,
        unset="required",
        group="cluster",
    )
    advertise: Address | None = setting(
        None,
        "address by which front ends reach the worker, if a proxy or address translation is between",
        unit="ADDRESS",
        parse=parse_address,
        is_forwarded=False,
        unset="--listen",
        group="cluster",
    )
    kv_listen: Address | None = setting(
        None,
        "where other workers pull KV and features of images from this one: unix:/path, which shares memory, or tcp://host:port with the "
        "TLS and secret of links",
        unit="ADDRESS",
        parse=parse_address,
        is_forwarded=False,
        unset="the path of --listen with .kv added, or the host of --listen with any free port",
        group="cluster",
    )
    kv_streams: int = count(
        4,
        "TCP connections to each worker from which KV is pulled. If more than one, the first carries only messages",
        minimum=1,
        maximum=16,
        group="cluster",
    )
    role: Role = setting(
        "aggregated",
        "what the worker does. prefill: it computes prompts for decode workers; decode: it pulls the KV of these prompts and continues "
        "them; aggregated: both. If no worker of the other role is left, a prefill or decode worker does both, except with SGLang. "
        "encode: it only makes features of images, for all other workers",
        choices=get_args(Role),
        is_forwarded=False,
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
        self.link_tls.check()
        self.check_engine()

    def unencrypted(self) -> list[str]:
        """What others on the network can read."""
        found = []
        if isinstance(self.listen, TcpAddress) and not is_loopback(self.listen.host) and self.link_tls.cert is None:
            found.append(f"prompts and answers on the links of --listen {self.listen}: {USE_LINK_TLS}")
        if isinstance(self.kv_listen, TcpAddress) and not is_loopback(self.kv_listen.host) and self.link_tls.cert is None:
            found.append(f"KV on --kv-listen {self.kv_listen}: {USE_LINK_TLS}")
        return found + unencrypted_store(self.store)

    def check_engine(self) -> None:
        if self.engine in EXTERNAL_ENGINES and self.model is None:
            kinds = "a directory in Hugging Face's layout, " + ("a GGUF file, " if self.engine == "http" else "") + "or a name on the hub"
            raise ConfigError(f"--engine {self.engine} needs --model, for the tokenizer too: {kinds}")
        if self.engine == "http" and not self.http.url:
            raise ConfigError("--engine http needs --url: the address of the engine's server, such as http://127.0.0.1:30000")
        if self.role == "encode" and self.engine in EXTERNAL_ENGINES:
            raise ConfigError(
                f"--role encode and --engine {self.engine}: this engine encodes images itself. Expected --engine embedded or simulator"
            )
        if self.engine == "http" and self.role != "aggregated":
            raise ConfigError(
                f"--role {self.role} and --engine http: an engine behind HTTP moves no KV, so nobody could continue its prompts"
            )
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
    workers: int | None = count(None, "worker processes to start", minimum=1, unset="1", group="server")
    prefill_workers: int | None = count(
        None,
        "worker processes that compute prompts, which those of --decode-workers continue. Give both flags instead of --workers",
        minimum=1,
        unset="none",
        group="server",
    )
    decode_workers: int | None = count(
        None, "worker processes that continue the prompts of --prefill-workers", minimum=1, unset="none", group="server"
    )

    encode_workers: int | None = count(
        None,
        "additional worker processes that only make features of images; 0: the other workers make them",
        minimum=0,
        unset="1 with the embedded engine on a CPU, if the model reads images",
        group="server",
    )

    @property
    def roles(self) -> tuple[Role, ...]:
        """The role of each worker process that makes tokens."""
        counts: dict[Role, int | None] = {"prefill": self.prefill_workers, "decode": self.decode_workers}
        if self.prefill_workers is None:
            counts = {"aggregated": self.workers or 1}
        return tuple([role for role, count in counts.items() for _ in range(count or 0)])

    def check(self) -> None:
        """Raises ConfigError for settings that do not fit together."""
        by_role = {"--prefill-workers": self.prefill_workers, "--decode-workers": self.decode_workers}
        given = [f"{flag} {count}" for flag, count in by_role.items() if count is not None]
        if given and self.workers is not None:
            raise ConfigError(f"--workers {self.workers} and {given[0]}: give --workers alone, or --prefill-workers and --decode-workers")
        if len(given) == 1:
            missing = next(flag for flag, count in by_role.items() if count is None)
            raise ConfigError(f"{given[0]} needs {missing} as well: one computes prompts for the other")
        if given and self.worker.engine == "http":
            raise ConfigError(f"{given[0]} and --engine http: an engine behind HTTP moves no KV, so nobody could continue its prompts")
        if self.encode_workers and self.worker.engine in EXTERNAL_ENGINES:
            asked = f"--encode-workers {self.encode_workers} and --engine {self.worker.engine}"
            raise ConfigError(f"{asked}: this engine encodes images itself")
        self.front_end.keys.check()
        self.front_end.link_tls.check()
        self.worker.check_engine()


COMMANDS: dict[str, type] = {"serve": ServeSettings, "worker": WorkerSettings, "frontend": FrontEndSettings}
"""The commands that take settings."""
