"""Moves the idle sessions of a worker that drains to others, with their KV."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator

from penstock.cluster.dispatch import Dispatcher
from penstock.cluster.pool import Member
from penstock.cluster.sessions.sessions import Sessions
from penstock.cluster.sessions.turn import Session, Turn
from penstock.router.policy import Hints, SessionWish
from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.wire.errors import GenerationFault
from penstock.wire.messages import GENERATION_ID_BYTES, Finish, SessionReport, Submit

log = logging.getLogger(__name__)

MAX_SESSIONS = 256
AT_ONCE = 4
MOVE_SECONDS = 5.0
"""For those that are idle at one look: the worker does not wait longer."""
LOOK_SECONDS = 0.5


class SessionMoves:
    """A move is a turn without tokens: the session's new worker pulls its KV, computes the rest, and gives the lease.

    The most recently used go first. Those that are left when the worker is gone are computed again with their next turn.
    """

    def __init__(self, sessions: Sessions, dispatcher: Dispatcher) -> None:
        self._sessions = sessions
        self._dispatcher = dispatcher
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, member: Member) -> None:
        """This worker drains."""
        task = asyncio.create_task(self._move_all(member), name=f"moving the sessions of {member.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _move_all(self, member: Member) -> None:
        """Those that are idle now, and those whose turn ends there before the worker does."""
        tried: set[Session] = set()
        while not member.link.lost.done():
            idle = [session for session in self._sessions.idle_at(member.name) if session not in tried]
            tried.update(idle)
            if idle:
                await self._move_some(member, idle)
            await asyncio.wait([member.link.lost], timeout=LOOK_SECONDS)

    async def _move_some(self, member: Member, idle: list[Session]) -> None:
        is_possible = member.model.kv_fingerprint and self._sessions.pool.usable(member.model.name)
        moving = iter(idle[:MAX_SESSIONS] if is_possible else ())
        try:
            async with asyncio.timeout(MOVE_SECONDS):
                moved = await asyncio.gather(*[self._move_each(member, moving) for _ in range(AT_ONCE)])
            log.info("worker %s drains: %d of %d idle sessions have moved", member.name, sum(moved), len(idle))
        except TimeoutError:
            log.warning("worker %s drains: not all of %d idle sessions have moved", member.name, len(idle))
        for session in idle:
            if session.binding.worker == member.name:
                # It need not wait for these.
                member.link.close_session(session.key, session.binding.epoch, frees=False)

    async def _move_each(self, member: Member, sessions: Iterator[Session]) -> int:
        moved = 0
        for session in sessions:
            for report in await member.link.describe_sessions([session.key], with_tokens=True):
                if report.token_ids and not session.active and self._sessions.is_open(session):
                    moved += await self._move(member, session, report)
        return moved

    async def _move(self, member: Member, session: Session, report: SessionReport) -> bool:
        """Runs the turn. Returns whether it has finished."""
        binding = session.binding
        turn = Turn(self._sessions, session.owner, Hints(SessionWish(binding.session, "continue", binding.timeout)))
        identity, images = secrets.token_bytes(GENERATION_ID_BYTES), report.images
        request = Submit(identity, report.token_ids, 0, 0, root=report.root, lane=report.lane, images=images)
        try:
            await self._sessions.begin(turn, binding.model)
            if turn.session is not session or session.active > 1 or session.binding.worker != member.name:
                # It was closed, or it goes elsewhere with a turn of its client.
                return False
            return await self._run(binding.model, turn, request)
        finally:
            self._sessions.end(turn)

    async def _run(self, model: str, turn: Turn, request: Submit) -> bool:
        doorbell = Doorbell()
        mailbox = Mailbox(doorbell)
        try:
            production = self._dispatcher.produce(model, turn, request, mailbox)
        except GenerationFault:
            return False
        try:
            while not mailbox.ended:
                await doorbell.wait()
                doorbell.answer()
            return isinstance(mailbox.take()[1], Finish)
        finally:
            production.cancel()
