"""The front end's links to its workers: opened, watched, and opened again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from penstock.cluster.links.link import HEARTBEAT_SECONDS
from penstock.cluster.links.security import LinkTls
from penstock.cluster.links.worker_link import MAX_UNANSWERED_LOOKS, WorkerLink, connect
from penstock.config.commands import FrontEndSettings
from penstock.text.tokenizers.cache import Fetch
from penstock.wire.address import Address, TcpAddress
from penstock.wire.errors import HandshakeRefused, LinkBroken, LinkError, PenstockError, WorkerStalled
from penstock.wire.messages import ModelInfo, Role

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.05
MAX_RETRY_SECONDS = 0.5
MAX_PREPARE_RETRY_SECONDS = 5.0
"""For a worker whose model cannot be prepared: every attempt may fetch and read a tokenizer."""

# A worker is looked at LOOKS times per `stall_seconds`. After QUIET_LOOKS silent ones, new work goes elsewhere.
LOOKS = 16
QUIET_LOOKS = 2
MAX_MADE_UP_LOOKS = 2
JUST_NOW_SECONDS = 0.1


@dataclass(frozen=True)
class Member:
    """A worker with a live link."""

    name: str
    model: ModelInfo
    link: WorkerLink

    @property
    def is_encoder(self) -> bool:
        """It only makes features of images."""
        return self.model.roles == ("encode",)

    def is_for(self, role: Role) -> bool:
        return role in self.model.roles or "aggregated" in self.model.roles

    def can_meet(self, other: Member) -> bool:
        """Whether it can continue prompts only together with an engine that computes them, and the other one is such an engine."""
        return "decode" in self.model.roles and "prefill" in other.model.roles and self.model.kv_fingerprint == other.model.kv_fingerprint

    @property
    def is_quiet(self) -> bool:
        """It has running generations and has sent nothing for QUIET_LOOKS looks."""
        return self.link.silent_ticks >= QUIET_LOOKS


class PoolListener(Protocol):
    """Called when workers join and leave."""

    def joined(self, member: Member) -> None: ...

    def left(self, member: Member) -> None: ...


class WorkerPool:
    """Keeps one link to each worker, as long as its context is entered.

    Before a worker gets work, `prepare` is awaited with its model and a function that fetches its tokenizer, so that the front end can
    load it. If `prepare` raises, the worker is not used; this is logged once, and the pool connects again after a delay that grows. A
    worker that has running generations and sends nothing for `stall_seconds` loses its link, as does an idle one that does not answer
    the heartbeat. It gets a new link when it answers.
    """

    def __init__(
        self,
        addresses: Iterable[Address],
        front_end: str,
        secret: str,
        prepare: Callable[[ModelInfo, Fetch], Awaitable[None]],
        stall_seconds: float = FrontEndSettings.worker_stall,
        *,
        tls: LinkTls | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._fixed = frozenset(addresses)
        self._wanted = self._fixed
        self._front_end = front_end
        self._secret = secret
        self._prepare = prepare
        self._stall_seconds = stall_seconds
        self._tls = tls
        self._heartbeat_seconds = heartbeat_seconds
        self._members: dict[Address, Member] = {}
        self._keepers: dict[Address, asyncio.Task[None]] = {}
        self._watches: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self.listeners: list[PoolListener] = []
        self.links_lost = 0
        self.stalls = 0

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    def usable(self, model: str) -> list[Member]:
        """The workers of this model that take generations."""
        found = [member for member in self._members.values() if member.link.is_usable and member.model.name == model]
        return [member for member in found if not member.is_encoder]

    def speaking(self, members: Sequence[Member]) -> list[Member]:
        """Those that are alive as far as we know: they owe nothing, or have spoken just now. Just before the latest frame of any worker, as
        this front end may have been busy since. Those that have not answered a Ping are the last resort."""
        latest = max([member.link.heard_at for member in self._members.values()], default=0.0)
        alive = [member for member in members if not member.is_quiet and member.link.has_spoken_since(latest - JUST_NOW_SECONDS)]
        return [member for member in alive if not member.link.is_unanswered] or alive

    def encoders(self, target: Member) -> list[Member]:
        """The workers that make features of images as this one needs them."""
        made = target.model.name, target.model.image_fingerprint
        found = [member for member in self._members.values() if member.is_encoder and member.link.is_usable]
        return [member for member in found if made[1] and (member.model.name, member.model.image_fingerprint) == made]

    def find(self, name: str) -> Member | None:
        """The worker of this name, if its link is alive."""
        return next((member for member in self._members.values() if member.name == name), None)

    async def __aenter__(self) -> Self:
        self.discovered(())
        self._watches = [
            asyncio.create_task(self._watch_stalls(), name="stall watch of the workers"),
            asyncio.create_task(self._watch_hosts(), name="heartbeat of the links"),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._keepers.values(), *self._watches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def discovered(self, addresses: Iterable[Address]) -> None:
        """Sets the workers besides those given at the start. A worker that is no longer listed keeps its link until that breaks: it may
        still be finishing its generations."""
        self._wanted = self._fixed.union(addresses)
        for address in self._wanted - self._keepers.keys():
            self._keepers[address] = asyncio.create_task(self._keep(address), name=f"link to {address}")

    async def wait_ready(self) -> None:
        """Returns when all workers given at the start are connected; when none was given, as soon as one is."""
        while not (self._fixed <= self._members.keys() if self._fixed else self._members):
            self._changed.clear()
            await self._changed.wait()

    async def _keep(self, address: Address) -> None:
        """Connects, and connects again when the link is lost or the worker cannot be used, until the worker is no longer wanted."""
        delay = FIRST_RETRY_SECONDS
        refusal = ""
        while address in self._wanted:
            max_delay = MAX_RETRY_SECONDS
            try:
                await self._connect_and_hold(address)
                delay, refusal = FIRST_RETRY_SECONDS, ""
            except (HandshakeRefused, _Unusable) as error:
                if str(error) != refusal:
                    log.error("worker at %s: %s", address, error, exc_info=error.__cause__)  # noqa: TRY400, once per reason
                refusal = str(error)
                max_delay = MAX_PREPARE_RETRY_SECONDS if isinstance(error, _Unprepared) else MAX_RETRY_SECONDS
            except LinkError as error:
                log.debug("%s", error)
            await asyncio.sleep(delay)
            delay = min(delay * 2, max_delay)
        del self._keepers[address]

    async def _connect_and_hold(self, address: Address) -> None:
        link, welcome = await connect(address, self._front_end, self._secret, self._tls)
        try:
            await self._hold(address, Member(welcome.name, welcome.model, link))
        finally:
            link.abort()

    async def _hold(self, address: Address, member: Member) -> None:
        """Keeps the worker as a member of the pool until its link is lost. Raises _Unusable when it cannot become one."""
        self._check(member)
        try:
            if not member.is_encoder:
                await self._prepare(member.model, member.link.fetch_tokenizer)
        except PenstockError as error:
            raise _Unprepared(f"{member.name} cannot be used: {error}") from None
        except Exception as error:
            raise _Unprepared(f"{member.name} cannot be used: {type(error).__name__}: {error}") from error
        self._check(member)
        self._members[address] = member
        for listener in self.listeners:
            listener.joined(member)
        self._changed.set()
        is_open = isinstance(address, TcpAddress) and self._tls is None
        log.info("worker %s at %s serves %s%s", member.name, address, member.model.name, "; the link is not encrypted" if is_open else "")
        try:
            reason = await asyncio.shield(member.link.lost)
        finally:
            del self._members[address]
            for listener in self.listeners:
                listener.left(member)
            self._changed.set()
        self.links_lost += 1
        log.warning("worker %s is gone: %s", member.name, reason)

    def _check(self, member: Member) -> None:
        """Raises _Unusable for a worker that contradicts a member of the pool."""
        for other in self._members.values():
            if other.name == member.name:
                raise _Unusable(f"there is a worker named {member.name!r} already; give each its own --name")
            if member.is_encoder or other.is_encoder or other.model.name != member.model.name:
                continue
            if model_identity(other.model) != model_identity(member.model):
                raise _Unusable(
                    f"{member.name} cannot be used: its model {member.model.name!r} differs from the one that {other.name} serves under "
                    f"that name: {model_identity(member.model)} against {model_identity(other.model)}; give it another --served-name"
                )

    async def _watch_stalls(self) -> None:
        loop, interval = asyncio.get_running_loop(), self._stall_seconds / LOOKS
        due = loop.time()
        while True:
            due = next_look(due, interval, loop.time())
            await asyncio.sleep(due - loop.time())
            for member in self.members:
                member.link.tick()
                if member.link.silent_ticks > LOOKS:
                    self.stalls += 1
                    message = f"worker {member.name} has running generations and has sent nothing for {self._stall_seconds:g} s"
                    member.link.give_up(WorkerStalled(message))

    async def _watch_hosts(self) -> None:
        """Gives up idle links to workers that do not answer, so that no request is sent there first."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            for member in self.members:
                if not member.link.beat():
                    seconds = MAX_UNANSWERED_LOOKS * self._heartbeat_seconds
                    member.link.give_up(LinkBroken(f"worker {member.name} has not answered for {seconds:g} s: its host is gone or hangs"))


def next_look(due: float, interval: float, now: float) -> float:
    """When to look next, after a look that was due at a time. Delays do not add up: a few looks that were missed are made up for, with what
    has come read between them. Not more: this front end may have slept, and must not take that for the silence of workers."""
    return due + interval if now < due + (1 + MAX_MADE_UP_LOOKS) * interval else now + interval


class _Unusable(PenstockError):
    """The worker answers, and this front end cannot use it."""


class _Unprepared(_Unusable):
    """Its model could not be prepared."""


def model_identity(model: ModelInfo) -> dict[str, object]:
    """What two workers of one model must have in common, so that one can continue a generation of the other."""
    sizes = {"vocabulary": model.vocab_size, "context": model.context_length, "block": model.block_size}
    return {"tokenizer": model.tokenizer, **sizes, "images": model.images}
