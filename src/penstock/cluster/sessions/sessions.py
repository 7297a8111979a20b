"""The front end's sessions: where an agent's turns go, and how long its KV is kept.

First a worker grants the lease, then the session is bound to that worker in a store that several front ends may share. While a turn
runs, the binding is renewed. After the last turn it lives for the session's timeout; then the reaper ends it here and on the worker.
If this front end dies, the store's expiry and the worker's own timer end it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Self

from msgspec import structs

from penstock.cluster.pool import WorkerPool
from penstock.cluster.sessions.turn import Session, Turn
from penstock.lazy_heap import LazyHeap
from penstock.router.affinity import AffinityStore, Binding, affinity_key, session_key
from penstock.router.policy import SessionWish
from penstock.wire.messages import SessionReport

log = logging.getLogger(__name__)

# While a turn runs, the binding lives this much longer than its timeout, and is renewed this often.
ACTIVE_MARGIN_SECONDS = 30.0
KEEP_ALIVE_SECONDS = 10.0
# How long a key without a session remembers its worker.
AFFINITY_SECONDS = 600.0
# The store's clock and ours may differ a little. With this slack, a session that we reap has expired in the store, too.
REAP_SLACK_SECONDS = 0.05
MAX_NAP_SECONDS = 1.0
# A worker answers between two steps. One that is stuck is not waited for.
ASK_SECONDS = 5.0
# A move raises the epoch by one. A session that is opened again starts above all epochs of its moves.
EPOCH_STEP = 1 << 10

Listing = tuple[Binding, SessionReport | None]
"""A session of the store, and what its worker reports. None: the worker is gone, or does not answer in time."""


@dataclass(eq=False)
class Sessions:
    """All sessions that had a turn at this front end. Its background tasks run while it is entered as a context, and end with it.

    `begin` waits for the store; nothing else that a turn needs does. A store or a worker that is gone never fails a turn.
    """

    store: AffinityStore
    pool: WorkerPool
    _: KW_ONLY
    quota: int
    on_end: Callable[[str], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    keep_alive_seconds: float = KEEP_ALIVE_SECONDS

    def __post_init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._active: set[Session] = set()
        # Sessions without a running turn, by the time at which they end.
        self._expiries: LazyHeap[Session, float] = LazyHeap()
        self._some_expire = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        """What happened to sessions: opened, moved, expired, closed, over_quota, unknown."""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_idle(self) -> bool:
        """No turn is running, and the store knows about the end of all turns."""
        return not self._active and not self._tasks

    async def __aenter__(self) -> Self:
        self._loops = [
            asyncio.create_task(self._reap(), name="session reaper"),
            asyncio.create_task(self._keep_alive(), name="session keep-alive"),
        ]
        for task in self._loops:
            task.add_done_callback(_report_failure)
        return self

    async def __aexit__(self, *_: object) -> None:
        while tasks := [task for task in (*self._loops, *self._tasks) if not task.done()]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def begin(self, turn: Turn, model: str) -> None:
        """Looks up what the turn's session or key is bound to. `end` must follow, whatever happens to the turn."""
        wish = turn.hints.session
        if wish is not None:
            await self._begin_session(turn, wish, model)
            if wish.parent is not None and (turn.session is None or not turn.session.binding.worker):
                turn.parent = await self.store.get(session_key(turn.owner, model, wish.parent))
        if turn.hints.affinity is not None:
            turn.affinity_key = affinity_key(turn.owner, model, turn.hints.affinity)
            turn.affinity = await self.store.get(turn.affinity_key)

    def end(self, turn: Turn) -> None:
        """The turn is over. After the last active turn the timeout starts, or a close that waited for it is carried out."""
        session = turn.session
        if session is None:
            return
        turn.forget_left()
        session.active -= 1
        if not session.active:
            self._active.discard(session)
            session.settling += 1
            self._spawn(self._settle(session), "end of a session's turn")

    def idle_at(self, worker: str) -> list[Session]:
        """The sessions at this worker without a running turn, the most recently used first."""
        idle = [session for session in self._expiries if session.binding.worker == worker]
        return sorted(idle, key=lambda session: session.binding.timeout - self._expiries.priority(session))

    def is_open(self, session: Session) -> bool:
        """This incarnation has not ended."""
        return self._sessions.get(session.key) is session

    def granted(self, turn: Turn, session: Session, worker: str, epoch: int) -> None:
        """A worker has granted the lease, so the session is bound now. A lease at a place that the session left is given back."""
        if (worker, epoch) != session.place:
            self.end_on_worker(worker, session.key, epoch)
            return
        session.granted_epoch = epoch
        if session.bound_epoch != epoch and session.binding_task is None and self.is_open(session):
            session.binding_task = self._spawn(self._bind(turn, session), "session binding")

    def follow_affinity(self, turn: Turn, key: str, worker: str) -> None:
        """Binds a key to the worker of its last request, unless that was a detour around a busy worker."""
        known = turn.affinity
        was_gone = any(decision.diverted == "gone" for _, decision in turn.decisions if decision.worker == worker)
        if known is None or known.worker == worker or was_gone:
            self._spawn(self._bind_affinity(turn, key, known, worker), "affinity binding")

    async def list_sessions(self, owner: str, limit: int, after: str) -> list[Listing]:
        """At most `limit` sessions of this owner, ordered by id, after the id `after`. Each worker is asked once."""
        bindings = await self.store.list_sessions(owner, limit, after)
        keys: dict[str, list[str]] = {}
        for binding in bindings:
            keys.setdefault(binding.worker, []).append(session_key(owner, binding.model, binding.session))
        answers = await asyncio.gather(*[self._ask(worker, of_worker) for worker, of_worker in keys.items()])
        reports = {report.id: report for answer in answers for report in answer}
        return [(binding, reports.get(session_key(owner, binding.model, binding.session))) for binding in bindings]

    async def get_session(self, owner: str, session_id: str) -> Listing | None:
        """The session with this id; the first one if several models have it."""
        for model in self._models():
            key = session_key(owner, model, session_id)
            binding = await self.store.get(key)
            if binding is not None:
                reports = await self._ask(binding.worker, [key])
                return binding, reports[0] if reports else None
        return None

    async def close_session(self, owner: str, session_id: str) -> bool:
        """Ends the session, for every model. New turns do not find it; its worker ends it after the last active turn.

        Returns whether there was one.
        """
        closed = [await self._close_one(session_key(owner, model, session_id)) for model in self._models()]
        return any(closed)

    async def _close_one(self, key: str) -> bool:
        binding = await self.store.get(key)
        if binding is None or not await self.store.release(key, binding.epoch):
            return False
        self.end_on_worker(binding.worker, key, binding.epoch, frees=True)
        self.counts["closed"] += 1
        if (session := self._sessions.get(key)) is not None:
            session.is_closing = True
            self._abandon(session, frees=True)
        return True

    async def _ask(self, worker: str, keys: Sequence[str]) -> Sequence[SessionReport]:
        """What the worker reports about these; nothing when it is gone or does not answer in time."""
        member = self.pool.find(worker)
        if member is None:
            return ()
        try:
            async with asyncio.timeout(ASK_SECONDS):
                return await member.link.describe_sessions(keys)
        except TimeoutError:
            return ()

    def _models(self) -> list[str]:
        return list(dict.fromkeys(member.model.name for member in self.pool.members))

    async def _begin_session(self, turn: Turn, wish: SessionWish, model: str) -> None:
        key = session_key(turn.owner, model, wish.id)
        stored = await self.store.get(key)
        session = self._known(key, stored)
        if session is None and stored is None and wish.action != "open":
            self.counts["unknown"] += 1
            return
        if session is None:
            session = await self._open(key, turn.owner, wish, model, stored)
        if stored is not None and (session.bound_epoch is None or stored.epoch >= session.binding.epoch):
            worker, epoch = session.place
            if worker and epoch != stored.epoch:
                self.end_on_worker(worker, key, epoch)
            session.adopt(stored)
        if wish.action == "open":
            session.change_timeout(wish.timeout)
            session.is_closing = False
        if wish.action == "close" or wish.is_final:
            session.is_closing = turn.closes = True
        turn.state = "closed" if turn.closes else "open"
        turn.session = session
        session.active += 1
        self._active.add(session)
        self._expiries.discard(session)
        if session.bound_epoch is not None and not await self._renew(session, session.bound_epoch, stored):
            # It has just expired. The next lease binds it again.
            session.bound_epoch = None

    def _known(self, key: str, stored: Binding | None) -> Session | None:
        """The session with this key, unless it expired or another front end closed it."""
        session = self._sessions.get(key)
        is_gone = stored is None and self.store.is_available
        if session is not None and is_gone and session.bound_epoch is not None and not session.active:
            self._abandon(session)
            return None
        return session

    async def _open(self, key: str, owner: str, wish: SessionWish, model: str, stored: Binding | None) -> Session:
        if stored is None:
            stored = Binding(wish.id, "", model, await self.store.next_epoch() * EPOCH_STEP, wish.timeout, time.time())
            self.counts["opened"] += 1
        # Another turn may have opened it while we waited for the epoch.
        return self._sessions.setdefault(key, Session(key, owner, stored))

    async def _renew(self, session: Session, bound_epoch: int, stored: Binding | None) -> bool:
        """Keeps the binding while a turn runs. A changed timeout is written as well, for the other front ends."""
        timeout = session.binding.timeout
        seconds = timeout + ACTIVE_MARGIN_SECONDS
        if stored is None or stored.timeout == timeout:
            return await self.store.renew(session.key, bound_epoch, seconds)
        changed = structs.replace(stored, timeout=timeout)
        return (await self.store.rebind(session.key, stored.epoch, changed, seconds, session.owner)).epoch == bound_epoch

    async def _bind(self, turn: Turn, session: Session) -> None:
        """Writes the session's place into the store; again if it moved meanwhile and was granted there."""
        try:
            while session.bound_epoch != session.granted_epoch == session.binding.epoch and self.is_open(session):
                await self._bind_once(turn, session)
        finally:
            session.binding_task = None

    async def _bind_once(self, turn: Turn, session: Session) -> None:
        """If another front end was faster, its binding counts and our lease is given back."""
        binding, seconds = session.binding, session.binding.timeout + ACTIVE_MARGIN_SECONDS
        if session.bound_epoch is None:
            winner = (await self.store.claim(session.key, binding, seconds, session.owner, self.quota)).binding
        else:
            winner = await self.store.rebind(session.key, session.bound_epoch, binding, seconds, session.owner)
        if winner is None:
            turn.state = "over_quota"
            self.counts["over_quota"] += 1
            self.end_on_worker(binding.worker, session.key, binding.epoch)
            self._forget(session)
        elif (winner.worker, winner.epoch) == (binding.worker, binding.epoch):
            session.bound_epoch = binding.epoch
        else:
            self.end_on_worker(binding.worker, session.key, binding.epoch)
            session.adopt(winner)

    async def _bind_affinity(self, turn: Turn, key: str, known: Binding | None, worker: str) -> None:
        seconds = max(AFFINITY_SECONDS, turn.hints.longest_retention)
        if known is not None and known.worker == worker:
            await self.store.renew(key, known.epoch, seconds)
            return
        binding = Binding("", worker, "", await self.store.next_epoch(), seconds, time.time())
        if known is None:
            await self.store.claim(key, binding, seconds)
        else:
            await self.store.rebind(key, known.epoch, binding, seconds)

    async def _settle(self, session: Session) -> None:
        """Tells the store that the last active turn has ended."""
        try:
            if session.binding_task is not None:
                await asyncio.wait([session.binding_task])
            if not session.active:
                await self._settle_idle(session)
        finally:
            session.settling -= 1

    async def _settle_idle(self, session: Session) -> None:
        if not self.is_open(session):
            # It was ended meanwhile. A turn that moved may still have a lease and a place in the store.
            await self._close(session)
        elif session.is_closing or session.bound_epoch is None:
            self.counts["closed"] += session.is_closing
            await self._close(session)
        elif await self.store.renew(session.key, session.bound_epoch, session.binding.timeout):
            if self.is_open(session) and not _is_in_use(session):
                self._expiries.put(session, self.clock() + session.binding.timeout + REAP_SLACK_SECONDS)
                self._some_expire.set()
        elif not _is_in_use(session):
            # Another front end closed or moved it, or the store forgot it.
            self._abandon(session)

    async def _close(self, session: Session) -> None:
        # First here, so that the next open makes another session.
        self._abandon(session, frees=session.is_closing)
        if session.bound_epoch is not None:
            await self.store.release(session.key, session.bound_epoch)

    def _abandon(self, session: Session, *, frees: bool = False) -> None:
        """Ends this incarnation. The worker ends the lease after the last active turn, and only if the epoch is this one."""
        worker, epoch = session.place
        self.end_on_worker(worker, session.key, epoch, frees=frees)
        self._forget(session)

    def end_on_worker(self, worker: str, key: str, epoch: int, *, frees: bool = False) -> None:
        """Only a close by the client frees. Otherwise the KV stays cached while there is room: the client may come back."""
        member = self.pool.find(worker)
        if member is not None:
            member.link.close_session(key, epoch, frees=frees)

    def _forget(self, session: Session) -> None:
        self._expiries.discard(session)
        if self.is_open(session):
            del self._sessions[session.key]
            self.on_end(session.key)

    async def _reap(self) -> None:
        """Ends sessions whose timeout is over."""
        while True:
            first = self._expiries.least()
            now = self.clock()
            if first is None:
                self._some_expire.clear()
                await self._some_expire.wait()
            elif first[0] <= now:
                await self._reap_one(self._expiries.pop())
            else:
                await asyncio.sleep(min(MAX_NAP_SECONDS, first[0] - now))

    async def _reap_one(self, session: Session) -> None:
        if session.settling:
            return
        stored = await self.store.get(session.key)
        if not self.is_open(session) or _is_in_use(session) or session.settling or session in self._expiries:
            # It was closed or had a turn while we asked. The end of that turn lists it again.
            return
        if not self.store.is_available or (stored is not None and stored.epoch == session.bound_epoch):
            # Another front end has had a turn of it since, or may have had. That one, or the worker's timer, ends it.
            self._forget(session)
            return
        self.counts["expired"] += 1
        self._abandon(session)

    async def _keep_alive(self) -> None:
        """Renews the bindings of sessions with a running turn, however long the turn takes."""
        while True:
            await asyncio.sleep(self.keep_alive_seconds)
            for session in list(self._active):
                if session.bound_epoch is None or not _is_in_use(session):
                    continue
                await self.store.renew(session.key, session.bound_epoch, session.binding.timeout + ACTIVE_MARGIN_SECONDS)
                if not _is_in_use(session):
                    # Its last turn ended meanwhile and may have told the store before us. Tell it again.
                    session.settling += 1
                    await self._settle(session)

    def _spawn(self, coroutine: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_report_failure)
        return task


def _is_in_use(session: Session) -> bool:
    return session.active > 0


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("%s failed", task.get_name(), exc_info=task.exception())
