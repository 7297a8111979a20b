"""The settings of the front end's parts: limits, routing, stored responses, API keys."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal, get_args

from penstock.config.setting import count, seconds, setting, settings_of
from penstock.wire.errors import ConfigError

Policy = Literal["kv", "round-robin", "least-loaded", "random"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
Disaggregation = Literal["auto", "always", "never"]
MIB = 2**20
MAX_QUOTA = 10**12
MIN_PRIORITY, MAX_PRIORITY = -10, 10
MAX_WEIGHT = 1000
API_KEY_VARIABLE = "PENSTOCK_API_KEY"
NO_STORE = "none"
ANY_ORIGIN = "*"
ANY_HOST = "*"
_KEY = re.compile(r"(?!.*,)[!-~]{1,512}")
_HOST = re.compile(r"[a-z0-9_]([a-z0-9._-]{0,251}[a-z0-9_])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]{1,5})?")


def check_origin(origin: str) -> str:
    """An origin as browsers send it, or `*`. Raises ValueError."""
    if origin != ANY_ORIGIN and not _ORIGIN.fullmatch(origin):
        raise ValueError("expected scheme://host or scheme://host:port in lower case, without a path, or *")
    return origin


def check_host(host: str) -> str:
    """A name as browsers send it in `Host`, without a port, or `*`. Raises ValueError."""
    if host != ANY_HOST and not _HOST.fullmatch(host):
        raise ValueError("expected a host's name in lower case, without a scheme and a port, or *")
    return host


def check_path(path: str) -> str:
    if not path:
        raise ValueError(f"expected a path, or {NO_STORE}")
    return path


@dataclass(frozen=True)
class Limits:
    """What a client may ask of the front end."""

    GROUP: ClassVar[str] = "limits"

    max_generations: int = count(16_384, "generations at once; further ones get status 429", minimum=1)
    max_body_bytes: int = setting(32 * MIB, "largest request body; a larger one gets status 413", unit="BYTES", minimum=1)
    body_memory: int = setting(
        64 * MIB,
        "memory for request bodies, from their first byte until their prompt is tokenized. Further bodies wait; after 10 seconds they get "
        "status 503",
        unit="MIB",
        above=0,
        scale=MIB,
    )
    answer_memory: int = setting(
        128 * MIB,
        "memory for large answers that clients have not read yet: those over 64 KiB from the response store or the tokenizer, and logprobs "
        "of prompts. Without room, a request gets status 503; with prompt logprobs over four times this size, it gets status 400",
        unit="MIB",
        above=0,
        scale=MIB,
    )
    stall_seconds: float = setting(
        60.0, "close the connection of a client that reads nothing for this long", name="stall_timeout", unit="SECONDS", above=0
    )
    keep_alive: float = seconds(
        5.0,
        "a stream sends something at least this often, even without tokens: first its headers, after a second, then comments or pings. "
        "After the headers, an error is an event: the status is 200. 0: a stream sends only tokens, and no headers before the first",
    )
    whole_keep_alive: float = seconds(
        40.0,
        "an answer that is not a stream sends its headers after this time, with status 200, and then white space at least every "
        "--keep-alive seconds until it is ready. 0: it sends nothing before it is ready",
    )


@dataclass(frozen=True)
class DispatchLimits:
    """How many generations wait, and for how long. Those that wait at the front end can still go to any worker."""

    GROUP: ClassVar[str] = "limits"

    worker_queue: int = count(
        4096,
        "generations that wait at one worker for their first token; the others wait at the front end. An API key that has none waiting at "
        "a worker may always send one",
        minimum=1,
    )
    max_queued: int = count(8192, "generations that wait at the front end until a worker has room; further ones get status 429")
    worker_wait: float = seconds(30.0, "how long a generation waits for a worker if its model has none")
    trial_seconds: float = seconds(
        2.0,
        "when a worker dies, its generations are tried one at a time on each other worker, to find a request that kills workers. After "
        "this time, the rest continue at once. 0: all continue at once",
    )


@dataclass(frozen=True)
class RouterSettings:
    """How to choose a worker. Its cost is `overlap_weight` × blocks to prefill there + `load_weight` × its load in blocks.

    The default of `load_weight` comes from bench/routing.py: a higher one loses cache hits, and zero lets one worker queue. A long prefix
    that every request has would still outweigh any load. So a worker is left out if it has over `max_lead` generations more than the
    worker with the fewest, and over LEAD_FACTOR times as many. Another worker then computes that prefix once and has it from then on.

    A preferred worker is overloaded when its load is more than `overload_blocks` above the load of the least loaded worker, and more than
    `overload_factor` times the load that the least loaded worker would have with this prompt added. So a longer prompt, which is more
    expensive to compute elsewhere, tolerates more load. A small load never moves a session, whatever the ratio.

    For engines that report what they cache, predictions last `sibling_seconds`: until the report, requests that arrive together go to the
    same worker. For other engines they last `prediction_seconds`.
    """

    GROUP: ClassVar[str] = "routing"

    policy: Policy = setting("kv", "how a worker is chosen; kv: by cached prefix and load", name="router", choices=POLICIES)
    overlap_weight: float = setting(1.0, "cost of one block to prefill", unit="WEIGHT", minimum=0)
    load_weight: float = setting(0.05, "cost of one block of load on a worker", unit="WEIGHT", minimum=0)
    temperature: float = setting(
        0.0,
        "for --router kv. 0: choose the cheapest worker; above 0: choose at random, cheap ones more often",
        name="router_temperature",
        unit="NUMBER",
        minimum=0,
    )
    prediction_seconds: float = seconds(
        120.0,
        "how long a prompt counts as cached where it was sent, for engines that do not report their cache",
        name="router_prediction_seconds",
    )
    sibling_seconds: float = seconds(
        10.0,
        "how long a prompt counts as cached where it was sent, for engines that report their cache. Until they report it, requests with "
        "the same new prefix go to the same worker",
        name="router_sibling_seconds",
    )
    max_lead: int = count(
        64,
        "--router kv skips a worker with over this many generations more than the least busy one (and over 1.5 times as many), even if the "
        "worker has the prefix cached. Sessions stay where they are",
        name="router_max_lead",
    )
    overload_blocks: float = setting(
        4096.0,
        "a session moves to another worker when the load of its worker is over two limits: this many blocks more than the least loaded "
        "worker, and --router-overload-factor",
        name="router_overload_blocks",
        unit="BLOCKS",
        minimum=0,
    )
    overload_factor: float = setting(
        8.0,
        "the other limit of --router-overload-blocks: this many times the load that the least loaded worker would have with the prompt",
        name="router_overload_factor",
        unit="FACTOR",
        minimum=1,
    )
    disaggregation: Disaggregation = setting(
        "auto",
        "when workers with --role prefill compute the prompts that other workers continue. auto: when that is cheaper, by measured rates "
        "and load; always: whenever such a worker has room; never: only if no other worker is left",
        choices=get_args(Disaggregation),
    )


@dataclass(frozen=True)
class ResumeLimits:
    """`memory` is for all resumable answers together, in bytes."""

    GROUP: ClassVar[str] = "resumable streams"

    grace: float = seconds(60.0, "how long a resumable answer continues without a reader", name="resume_grace")
    keep: float = seconds(300.0, "how long a resumable answer can be read again after its end", name="resume_keep")
    memory: int = setting(1024 * MIB, "memory for events of all resumable answers", name="resume_memory", unit="MIB", above=0, scale=MIB)


@dataclass(frozen=True)
class StoreLimits:
    """How long and how much the store of responses keeps. `bytes` is for all of it together."""

    GROUP: ClassVar[str] = "stored responses"

    seconds: float = setting(
        30 * 86_400.0,
        "how long a response is kept after it was made, and a conversation after its last use",
        name="response_ttl",
        unit="SECONDS",
        above=0,
    )
    bytes: int = setting(
        1024 * MIB,
        "largest size of the file; when it is full, the key that has the most loses its oldest responses and conversations",
        name="response_store_size",
        unit="MIB",
        minimum=1,
        scale=MIB,
    )


@dataclass(frozen=True)
class StoreSettings:
    """Where responses and conversations are kept."""

    GROUP: ClassVar[str] = "stored responses"

    path: str | None = setting(
        None,
        f"file that keeps responses and conversations; {NO_STORE}: they are not kept",
        name="response_store",
        unit="PATH",
        parse=check_path,
        unset="penstock/responses.db in $XDG_STATE_HOME or ~/.local/state",
    )
    limits: StoreLimits = StoreLimits()

    def location(self, environment: Mapping[str, str]) -> Path | None:
        """The file; None: nothing is kept."""
        if self.path is not None:
            return None if self.path == NO_STORE else Path(self.path)
        state = environment.get("XDG_STATE_HOME") or Path(environment.get("HOME") or Path.cwd()) / ".local" / "state"
        return Path(state) / "penstock" / "responses.db"


@dataclass(frozen=True)
class QuotaLimits:
    """What one API key may use. None: unlimited."""

    GROUP: ClassVar[str] = "API keys"

    requests_per_minute: int | None = count(
        None, "requests per minute of each key without its own limit in the key file", minimum=1, maximum=MAX_QUOTA, unset="no limit"
    )
    tokens_per_minute: int | None = count(
        None,
        "tokens per minute, of prompts and answers together, of each key without its own limit in the key file",
        minimum=1,
        maximum=MAX_QUOTA,
        unset="no limit",
    )
    concurrency: int | None = count(
        None,
        "generations at once of each key without its own limit in the key file",
        name="key_concurrency",
        minimum=1,
        maximum=MAX_QUOTA,
        unset="no limit",
    )
    max_priority: int | None = count(
        None,
        "highest priority that requests may claim, for each key without its own limit in the key file; a higher one is lowered to this",
        minimum=MIN_PRIORITY,
        maximum=MAX_PRIORITY,
        unset=f"{MAX_PRIORITY}, the highest",
    )

    def or_else(self, defaults: QuotaLimits) -> QuotaLimits:
        """These limits, and the defaults where these are None."""
        return replace(defaults, **{name: value for name, value in vars(self).items() if value is not None})


NO_LIMITS = QuotaLimits()


@dataclass(frozen=True)
class Key:
    """One key that is accepted. `digest` is its SHA-256; the key itself is not kept. A key of `weight` 2 has twice the share of others."""

    name: str
    digest: bytes = field(repr=False)
    limits: QuotaLimits = NO_LIMITS
    weight: int = 1


def key_digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_key(text: str) -> Key:
    """A key without a name. Raises ValueError."""
    if not _KEY.fullmatch(text):
        raise ValueError("expected 1 to 512 visible ASCII characters, without a comma or space")
    return Key("", key_digest(text.encode()))


@dataclass(frozen=True)
class KeySettings:
    """Where API keys come from. Without a key and a key file, clients need no key. An empty key file rejects every key."""

    GROUP: ClassVar[str] = "API keys"

    given: tuple[Key, ...] = setting(
        (),
        f"a key that clients may use; repeat for several. Other users of this machine can read command lines: prefer {API_KEY_VARIABLE} in "
        "the environment (several keys: separated by commas), or --key-file",
        name="api_key",
        unit="KEY",
        parse=read_key,
        is_secret=True,
        is_joined=True,
    )
    file: Path | None = setting(
        None, "file with the hashes of keys and their limits; see `penstock key new --help`", name="key_file", unit="PATH"
    )
    share_prefixes: bool | None = setting(
        None,
        "let all keys share the KV of equal prefixes: this saves prefill, but `cached_tokens` and timing tell one key what others send",
        unset="on without keys, off with keys",
    )
    defaults: QuotaLimits = NO_LIMITS

    def __post_init__(self) -> None:
        """Names the keys that have no name, and drops repeated ones."""
        unique: dict[bytes, Key] = {}
        for key in self.given:
            unique.setdefault(key.digest, key)
        numbered = [replace(key, name=key.name or f"api-key-{number}") for number, key in enumerate(unique.values(), 1)]
        object.__setattr__(self, "given", tuple(numbered))

    @property
    def are_needed(self) -> bool:
        return bool(self.given) or self.file is not None

    @property
    def shares_prefixes(self) -> bool:
        return not self.are_needed if self.share_prefixes is None else self.share_prefixes

    def check(self) -> None:
        """Raises ConfigError for limits without any key."""
        for each, value in zip(settings_of(QuotaLimits).values(), vars(self.defaults).values(), strict=True):
            if value is not None and not self.are_needed:
                raise ConfigError(f"{each.flag} is {value}, but there are no keys: give --key-file or {API_KEY_VARIABLE}")
