"""The front end's links to its workers: opened, watched, and opened again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Self

from penstock.cluster.address import Address
from penstock.cluster.worker_link import WorkerLink, connect
from penstock.wire.errors import HandshakeRefused, LinkError, PenstockError
from penstock.wire.messages import ModelInfo

log = logging.getLogger(__name__)

FIRST_RETRY = 0.05
LONGEST_RETRY = 0.5


@dataclass(frozen=True)
class Member:
    """A worker with a live link."""

    name: str
    model: ModelInfo
    link: WorkerLink


class WorkerPool:
    """Keeps one link to each worker while it is entered as a context.

    `prepare` is awaited with a worker's model before the worker gets work: the front end loads its tokenizer there.
    """

    def __init__(self, addresses: Sequence[Address], front_end: str, secret: str, prepare: Callable[[ModelInfo], Awaitable[None]]) -> None:
        self._addresses = addresses
        self._front_end = front_end
        self._secret = secret
        self._prepare = prepare
        self._members: dict[Address, Member] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self.links_lost = 0

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    def usable(self, model: str) -> list[Member]:
        """The workers of this model that take work."""
        return [member for member in self._members.values() if member.link.is_usable and member.model.name == model]

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep(address), name=f"link to {address}") for address in self._addresses]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_ready(self) -> None:
        """Returns when every worker is connected."""
        while len(self._members) < len(self._addresses):
            self._changed.clear()
            await self._changed.wait()

    async def _keep(self, address: Address) -> None:
        """Connects, and again whenever the link is lost, with a back-off while that fails."""
        delay = FIRST_RETRY
        refusal = ""
        while True:
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
                    delay = FIRST_RETRY
                except PenstockError as error:
                    log.error("worker %s at %s cannot be used: %s", welcome.name, address, error)  # noqa: TRY400
                finally:
                    link.abort()
            await asyncio.sleep(delay)
            delay = min(delay * 2, LONGEST_RETRY)

    async def _hold(self, address: Address, member: Member) -> None:
        """A member of the pool until its link is lost."""
        await self._prepare(member.model)
        self._members[address] = member
        self._changed.set()
        log.info("worker %s at %s serves %s", member.name, address, member.model.name)
        try:
            reason = await asyncio.shield(member.link.lost)
        finally:
            del self._members[address]
            self._changed.set()
        self.links_lost += 1
        log.warning("worker %s is gone: %s", member.name, reason)
