"""API keys, and the tenant of a request. Only hashes of keys are kept, and they are never shown."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from penstock.api.auth.quota import Clock, Quota
from penstock.config.front_end import (
    MAX_PRIORITY,
    MAX_QUOTA,
    MAX_WEIGHT,
    MIN_PRIORITY,
    NO_LIMITS,
    Key,
    KeySettings,
    QuotaLimits,
    key_digest,
)
from penstock.kv.blocks import ROOT, tenant_root
from penstock.metrics.frontend import Tally
from penstock.wire.errors import ConfigError

log = logging.getLogger(__name__)

Headers = Iterable[tuple[bytes, bytes]]
"""As ASGI has them: names in lower case."""

NOBODY = "nobody"
"""The name and owner of requests without a key."""

KEY_PREFIX = "psk-"
RELOAD_SECONDS = 1.0
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_GIVEN_NAME = re.compile(r"api-key-[0-9]+")
_BEARER = re.compile(rb"\Abearer(?:\s+|\Z)", re.IGNORECASE)
# This much of a hash is looked up in a table, which does not take constant time. The rest is compared in constant time.
_PREFIX_BYTES = 4
# Without configured keys, remember at most this many owners: clients could fill the memory with invented keys.
_MAX_STRANGERS = 4096


@dataclass(frozen=True, slots=True)
class Tenant:
    """The tenant that a request belongs to. `owner` is the namespace of its sessions and answers, `quota` what it may use.

    Where tenants share something, `lane` is its name and `weight` its share. The lane is empty on a server with one key, and on a server
    without keys, where anybody could invent names. `root` is the root of its KV blocks. Tenants that share prefixes have the same root.
    """

    name: str
    owner: str = field(repr=False)
    quota: Quota = field(repr=False)
    lane: str = ""
    weight: int = 1
    root: bytes = field(default=ROOT, repr=False)


def presented_key(headers: Headers) -> bytes:
    """The API key of a request: a bearer token, or else `x-api-key`. Empty without a key."""
    bearer = key = b""
    for name, value in headers:
        if name == b"authorization":
            bearer = _BEARER.sub(b"", value.strip())
        elif name == b"x-api-key":
            key = value.strip()
    return bearer or key


def owner_of(key: bytes) -> str:
    """The namespace of an API key: a hash. The key itself is not kept."""
    return hashlib.blake2b(key, digest_size=16, person=b"penstock-owner").hexdigest() if key else NOBODY


def check_name(name: str) -> str:
    """A name that can be shown in logs and metrics. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"key name {name[:80]!r}: expected 1 to 64 of the characters A-Z a-z 0-9 _ . -")
    if name.startswith(KEY_PREFIX):
        # The message leaves out the name: it may be a key.
        raise ConfigError(f"a key name must not begin with {KEY_PREFIX}: it looks like a key, and names are shown in logs and metrics")
    if name == NOBODY or _GIVEN_NAME.fullmatch(name):
        raise ConfigError(f"key name {name!r} is reserved: expected a name other than {NOBODY}, api-key-1, api-key-2, …")
    return name


_Limit = Annotated[int, Meta(ge=1, le=MAX_QUOTA)]


class _Entry(Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")]
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    concurrency: _Limit | None = None
    max_priority: Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)] | None = None
    weight: Annotated[int, Meta(ge=1, le=MAX_WEIGHT)] = 1


class _File(Struct, forbid_unknown_fields=True, frozen=True):
    keys: list[_Entry] = []


def read_key_file(path: Path) -> tuple[Key, ...]:
    """The keys of a file. Raises ConfigError that says what is wrong, and shows only names."""
    try:
        return parse_keys(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror or error}") from error
    except ConfigError as error:
        raise ConfigError(f"key file {path}: {error}") from error
    except UnicodeDecodeError:
        # The cause is left out: it contains the text.
        raise ConfigError(f"key file {path}: expected UTF-8") from None


def parse_keys(text: str) -> tuple[Key, ...]:
    """The keys of a file's text. Raises ConfigError."""
    try:
        entries = msgspec.convert(tomllib.loads(text), _File).keys
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(str(error)) from None
    keys = tuple(
        Key(
            check_name(entry.name),
            bytes.fromhex(entry.sha256),
            QuotaLimits(entry.requests_per_minute, entry.tokens_per_minute, entry.concurrency, entry.max_priority),
            entry.weight,
        )
        for entry in entries
    )
    _refuse_doubles(keys)
    return keys


def _refuse_doubles(keys: Sequence[Key]) -> None:
    names: set[str] = set()
    holders: dict[bytes, str] = {}
    for key in keys:
        if key.name in names:
            raise ConfigError(f"two keys have the name {key.name!r}")
        if key.digest in holders:
            raise ConfigError(f"{holders[key.digest]!r} and {key.name!r} are the same key")
        names.add(key.name)
        holders[key.digest] = key.name


@dataclass(slots=True)
class _Known:
    """An accepted key. Its tenant is known after its first request: the owner is a hash of the key itself."""

    key: Key
    quota: Quota
    tenant: Tenant | None = None


class Keyring:
    """The accepted keys. Those of the key file follow its changes.

    A changed file is read again within a second. A file that cannot be read is logged and changes nothing. Requests of a removed key
    run to their end.
    """

    def __init__(self, settings: KeySettings, tally: Tally, clock: Clock = time.monotonic) -> None:
        """Raises ConfigError when the key file cannot be read."""
        self.is_open = not settings.are_needed
        self.nobody = Tenant(NOBODY, NOBODY, Quota(NOBODY, NO_LIMITS, tally, clock), root=_root(settings, NOBODY))
        """The tenant of requests without a key."""
        self._settings = settings
        self._tally = tally
        self._clock = clock
        self._quotas: dict[str, Quota] = {}
        self._strangers: dict[str, Tenant] = {}
        self._known: dict[bytes, list[_Known]] = {}
        self._version = _version(settings.file)
        self._replace(() if settings.file is None else read_key_file(settings.file))

    def __len__(self) -> int:
        return sum(map(len, self._known.values()))

    def tenant_of(self, key: bytes) -> Tenant | None:
        """The tenant of a key; None for an unknown key. When no key is needed, every key has its own namespace."""
        if self.is_open:
            return self._stranger(owner_of(key)) if key else self.nobody
        digest = key_digest(key)
        for known in self._known.get(digest[:_PREFIX_BYTES], ()):
            if hmac.compare_digest(known.key.digest, digest):
                if known.tenant is None:
                    lane, owner = known.key.name if len(self._quotas) > 1 else "", owner_of(key)
                    root = _root(self._settings, owner)
                    known.tenant = Tenant(known.key.name, owner, known.quota, lane, known.key.weight, root)
                return known.tenant
        return None

    async def refresh(self) -> None:
        """Reads the key file again if it has changed since it was last tried."""
        path = self._settings.file
        version = _version(path)
        if path is None or version == self._version:
            return
        self._version = version
        try:
            # In a thread: a long file takes a while.
            self._replace(await asyncio.to_thread(read_key_file, path))
        except ConfigError as error:
            log.error("%s; the keys stay as they were", error)  # noqa: TRY400, the message says all
        else:
            log.info("key file %s was read again: %d keys", path, len(self))

    async def watch(self) -> None:
        """Follows changes of the key file. Runs until it is cancelled."""
        while self._settings.file is not None:
            await asyncio.sleep(RELOAD_SECONDS)
            await self.refresh()

    def _replace(self, keys: Sequence[Key]) -> None:
        """Replaces the keys of the file. A key that stays keeps what it has used."""
        keys = (*self._settings.given, *keys)
        _refuse_doubles(keys)
        known: defaultdict[bytes, list[_Known]] = defaultdict(list)
        quotas = {}
        for key in keys:
            quotas[key.name] = self._quota(key)
            known[key.digest[:_PREFIX_BYTES]].append(_Known(key, quotas[key.name]))
        for name in self._quotas.keys() - quotas.keys():
            self._quotas[name].retire()
        self._known, self._quotas = dict(known), quotas

    def running(self) -> dict[str, int]:
        """Generations that have not ended, by name of the key. Without keys, those of everybody."""
        return {NOBODY: self.nobody.quota.running} if self.is_open else {name: quota.running for name, quota in self._quotas.items()}

    def _quota(self, key: Key) -> Quota:
        limits = key.limits.or_else(self._settings.defaults)
        quota = self._quotas.get(key.name)
        if quota is None:
            return Quota(key.name, limits, self._tally, self._clock)
        if quota.limits != limits:
            quota.change(limits)
        return quota

    def _stranger(self, owner: str) -> Tenant:
        tenant = self._strangers.get(owner)
        if tenant is None:
            if len(self._strangers) >= _MAX_STRANGERS:
                del self._strangers[next(iter(self._strangers))]
            tenant = self._strangers[owner] = Tenant(NOBODY, owner, self.nobody.quota, root=_root(self._settings, owner))
        return tenant


def _root(settings: KeySettings, owner: str) -> bytes:
    return ROOT if settings.shares_prefixes else tenant_root(owner)


def _version(path: Path | None) -> tuple[int, ...] | None:
    """Changes when the content of the file changes. None without a file."""
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    return None if status is None else (status.st_mtime_ns, status.st_ino, status.st_size)
