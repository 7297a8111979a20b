"""The front end's links to its workers: opened, watched, and opened again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, Self

from penstock.cluster.links.address import Address
from penstock.cluster.links.worker_link import WorkerLink, connect
from penstock.wire.errors import ConfigError, HandshakeRefused, LinkError, PenstockError, WorkerStalled
from penstock.wire.messages import ModelInfo

log = logging.getLogger(__name__)

FIRST_RETRY = 0.05
LONGEST_RETRY = 0.5
# A worker is looked at so often in the time after which it counts as stalled; after the quiet ones, new work goes elsewhere.
LOOKS = 16
QUIET_LOOKS = 2


@dataclass(frozen=True)
class Member:
    """A worker with a live link."""

    name: str
    model: ModelInfo
    link: WorkerLink

    @property
    def is_quiet(self) -> bool:
        """It owes tokens and has said nothing for a part of the stall time."""
        return self.link.silent_ticks >= QUIET_LOOKS


class PoolListener(Protocol):
    """Who wants to know of workers that come and go."""

    def joined(self, member: Member) -> None: ...

    def left(self, member: Member) -> None: ...


class WorkerPool:
    """Keeps one link to each worker while it is entered as a context.

    `prepare` is awaited with a worker's model before the worker gets work: the front end loads its tokenizer there. A worker that owes
    tokens and says nothing for `stall_seconds` loses its link; it is connected again when it answers.
    """

    def __init__(
        self,
        addresses: Iterable[Address],
        front_end: str,
        secret: str,
        prepare: Callable[[ModelInfo], Awaitable[None]],
        stall_seconds: float = 30.0,
    ) -> None:
        self._fixed = frozenset(addresses)
        self._wanted = self._fixed
        self._front_end = front_end
        self._secret = secret
        self._prepare = prepare
        self._stall_seconds = stall_seconds
        self._members: dict[Address, Member] = {}
        self._keepers: dict[Address, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self.listeners: list[PoolListener] = []
        self.links_lost = 0
        self.stalls = 0

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    def usable(self, model: str) -> list[Member]:
        """The workers of this model that take work."""
        return [member for member in self._members.values() if member.link.is_usable and member.model.name == model]

    def find(self, name: str) -> Member | None:
        """The worker of this name, if its link is alive."""
        return next((member for member in self._members.values() if member.name == name), None)

    async def __aenter__(self) -> Self:
        self.discovered(())
        self._watch = asyncio.create_task(self._watch_stalls(), name="stall watch of the workers")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._keepers.values(), *([self._watch] if self._watch is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def discovered(self, addresses: Iterable[Address]) -> None:
        """These are the workers, beside those that were given from the start. A live link to another is kept until it breaks: a worker
        that is no longer listed may still be finishing what it runs."""
        self._wanted = self._fixed.union(addresses)
        for address in self._wanted - self._keepers.keys():
            self._keepers[address] = asyncio.create_task(self._keep(address), name=f"link to {address}")

    async def wait_ready(self) -> None:
        """Returns when every worker that was given from the start is connected, or, when none was, any."""
        while not (self._fixed <= self._members.keys() if self._fixed else self._members):
            self._changed.clear()
            await self._changed.wait()

    async def _keep(self, address: Address) -> None:
        """Connects, and again whenever the link is lost, with a back-off while that fails; until the worker is wanted no more."""
        delay = FIRST_RETRY
        refusal = ""
        while address in self._wanted:
            try:
                link, welcome = await connect(address, self._front_end, self._secret)
            except HandshakeRefused as error:
                if str(error) != refusal:
                    log.error("worker at %s: %s", address, error)  # noqa: TRY400, said once and not at every attempt
                refusal = str(error)
            except LinkError as error:
                log.debug("%s", error)
            else:
                try:
                    await self._hold(address, Member(welcome.name, welcome.model, link))
                    delay, refusal = FIRST_RETRY, ""
                except PenstockError as error:
                    if str(error) != refusal:
                        log.error("worker %s at %s cannot be used: %s", welcome.name, address, error)  # noqa: TRY400
                    refusal = str(error)
                finally:
                    link.abort()
            await asyncio.sleep(delay)
            delay = min(delay * 2, LONGEST_RETRY)
        del self._keepers[address]

    async def _hold(self, address: Address, member: Member) -> None:
        """A member of the pool until its link is lost."""
        self._check(member)
        await self._prepare(member.model)
        self._check(member)
        self._members[address] = member
        for listener in self.listeners:
            listener.joined(member)
        self._changed.set()
        log.info("worker %s at %s serves %s", member.name, address, member.model.name)
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
        """Raises ConfigError for a worker that cannot stand beside those that are here."""
        for other in self._members.values():
            if other.name == member.name:
                raise ConfigError(f"there is a worker named {member.name!r} already; give each its own --name")
            if other.model.name == member.model.name and _essence(other.model) != _essence(member.model):
                raise ConfigError(
                    f"its model {member.model.name!r} is not the one that {other.name} serves under that name: "
                    f"{_essence(member.model)} against {_essence(other.model)}; give it another --served-name"
                )

    async def _watch_stalls(self) -> None:
        while True:
            await asyncio.sleep(self._stall_seconds / LOOKS)
            for member in self.members:
                member.link.tick()
                if member.link.silent_ticks > LOOKS:
                    self.stalls += 1
                    message = f"worker {member.name} owes tokens and has said nothing for {self._stall_seconds:g} s"
                    member.link.give_up(WorkerStalled(message))


def _essence(model: ModelInfo) -> dict[str, object]:
    """What must be equal, or a generation that one worker began could not go on with the other."""
    return {"tokenizer": model.tokenizer, "vocabulary": model.vocab_size, "context": model.context_length, "block": model.block_size}
