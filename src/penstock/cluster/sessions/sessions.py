"""The front end's sessions: where an agent's turns go, and for how long its KV is asked to be kept.

A session is bound to a worker once the worker has granted its lease, in a store that several front ends may share. While a turn runs, the
binding is kept alive; from the end of the last one it runs for the session's timeout. Then the reaper ends it, here and on the worker;
if this front end has died by then, the store's own expiry and the worker's own timer do.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Self

from msgspec import structs

from penstock.cluster.pool import WorkerPool
from penstock.cluster.sessions.turn import Session, Turn
from penstock.router.affinity import AffinityStore, Binding, affinity_key, session_key
from penstock.router.policy import Hints, SessionWish
from penstock.wire.messages import SessionReport

log = logging.getLogger(__name__)

# How much longer than its timeout a binding lives while a turn runs, and how often it is renewed then.
ACTIVE_MARGIN = 30.0
KEEP_ALIVE_SECONDS = 10.0
# How long a mere key, without a session, remembers its worker.
AFFINITY_SECONDS = 600.0
# The store's clock and ours may differ by a little: a session that we reap has expired there, too.
REAP_SLACK = 0.05
LONGEST_NAP = 1.0
# A worker that computes answers between two steps; one that is stuck is not waited for.
ASK_SECONDS = 5.0
# Epochs of one session that moves go up by one; a session that is opened anew starts beyond those.
EPOCH_STEP = 1 << 10


Listing = tuple[Binding, SessionReport | None]
"""A session of the store, and what its worker reports. None: the worker is gone, or does not answer in time."""


class Sessions:
    """All the sessions that this front end has a hand in, as a context: its tasks end with it, and are awaited."""

    def __init__(
        self,
        store: AffinityStore,
        pool: WorkerPool,
        *,
        quota: int,
        on_end: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._pool = pool
        self._quota = quota
        self._on_end = on_end
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._active: set[Session] = set()
        self._expiries: list[tuple[float, int, Session]] = []
        self._pushed = 0
        self._some_expire = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        """What became of sessions: opened, moved, expired, closed, over_quota, unknown."""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def in_turn(self) -> int:
        """Sessions with a running turn."""
        return len(self._active)

    @property
    def unsettled(self) -> int:
        """Tasks that still tell the store or a worker about an ended turn or session. The reaper and the keep-alive are not counted."""
        return len(self._tasks) - 2

    async def __aenter__(self) -> Self:
        self._spawn(self._reap(), "session reaper")
        self._spawn(self._keep_alive(), "session keep-alive")
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def turn(self, owner: str, hints: Hints) -> Turn:
        return Turn(self, owner, hints)

    async def begin(self, turn: Turn, model: str) -> None:
        """Finds what the turn's session, or its key, is bound to. To be followed by `end`, however the turn goes."""
        hints, affinity, parent = turn.hints, None, None
        if hints.session is not None:
            await self._begin_session(turn, hints.session, model)
            if hints.session.parent is not None and (turn.session is None or turn.session.worker is None):
                parent = await self._store.get(session_key(turn.owner, model, hints.session.parent))
        if hints.affinity is not None:
            turn.affinity_key = affinity_key(turn.owner, model, hints.affinity)
            affinity = await self._store.get(turn.affinity_key)
        turn.prefer(affinity, parent)

    def end(self, turn: Turn) -> None:
        """The turn is over. The lease slides from now on if it was the last active one; a close that was put off is carried out."""
        session = turn.session
        if session is None:
            return
        session.active -= 1
        if not session.active:
            self._active.discard(session)
            session.settling += 1
            self._spawn(self._settle(session), "end of a session's turn")

    def is_open(self, session: Session) -> bool:
        """It has not been ended since the turn began."""
        return self._sessions.get(session.key) is session

    def count(self, event: str) -> None:
        self.counts[event] += 1

    def granted(self, turn: Turn, session: Session, worker: str, epoch: int) -> None:
        """A worker has given the session its lease: now it is bound. A lease where the session no longer is, is given back."""
        if (worker, epoch) != (session.worker, session.epoch):
            self._close_on_worker(worker, session.key, epoch)
            return
        session.granted_epoch = epoch
        if session.bound_epoch != epoch and session.binding is None and self.is_open(session):
            session.binding = self._spawn(self._bind(turn, session), "session binding")

    def follow_affinity(self, turn: Turn, key: str, known: Binding | None, worker: str) -> None:
        """A key goes where its last request went, unless that was only a detour."""
        was_gone = any(decision.diverted == "gone" for _, decision in turn.decisions if decision.worker == worker)
        if known is None or known.worker == worker or was_gone:
            self._spawn(self._bind_affinity(turn, key, known, worker), "affinity binding")

    async def list_sessions(self, owner: str, limit: int, after: str) -> list[Listing]:
        """Those of this owner, by their ids, after this one; the ids of one worker are asked for together."""
        bindings = await self._store.list_sessions(owner, limit, after)
        keys: dict[str, list[str]] = {}
        for binding in bindings:
            keys.setdefault(binding.worker, []).append(session_key(owner, binding.model, binding.session))
        answers = await asyncio.gather(*[self._ask(worker, of_worker) for worker, of_worker in keys.items()])
        reports = {report.id: report for answer in answers for report in answer}
        return [(binding, reports.get(session_key(owner, binding.model, binding.session))) for binding in bindings]

    async def get_session(self, owner: str, session_id: str) -> Listing | None:
        """The session of this id; the first of several models'."""
        for model in self._models():
            key = session_key(owner, model, session_id)
            binding = await self._store.get(key)
            if binding is not None:
                reports = await self._ask(binding.worker, [key])
                return binding, reports[0] if reports else None
        return None

    async def close_session(self, owner: str, session_id: str) -> bool:
        """Ends it, of every model, for new turns now; on its worker when its last active turn ends. Returns whether there was one."""
        closed = [await self._close_one(session_key(owner, model, session_id)) for model in self._models()]
        return any(closed)

    async def _close_one(self, key: str) -> bool:
        binding = await self._store.get(key)
        if binding is None or not await self._store.release(key, binding.epoch):
            return False
        self._close_on_worker(binding.worker, key, binding.epoch)
        self.counts["closed"] += 1
        if key in self._sessions:
            self._abandon(self._sessions[key])
        return True

    async def _ask(self, worker: str, keys: Sequence[str]) -> Sequence[SessionReport]:
        """What the worker knows of these; nothing when it is gone, or takes too long to say."""
        member = self._pool.find(worker)
        if member is None:
            return ()
        try:
            async with asyncio.timeout(ASK_SECONDS):
                return await member.link.describe_sessions(keys)
        except TimeoutError:
            return ()

    def _models(self) -> list[str]:
        return list(dict.fromkeys(member.model.name for member in self._pool.members))

    async def _settle(self, session: Session) -> None:
        """What follows when the last active turn has ended."""
        try:
            await self._settle_now(session)
        finally:
            session.settling -= 1

    async def _settle_now(self, session: Session) -> None:
        if session.binding is not None:
            await asyncio.wait([session.binding])
        if session.active:
            return
        if not self.is_open(session):
            # It was ended meanwhile; a turn that moved may have a lease, and a place in the store, all the same.
            await self._close(session)
        elif session.is_closing or session.bound_epoch is None:
            self.counts["closed"] += session.is_closing
            await self._close(session)
        elif await self._store.renew(session.key, session.bound_epoch, session.timeout):
            session.expires_at = self._clock() + session.timeout + REAP_SLACK
            self._list_expiry(session)
        elif not self._is_in_use(session):
            # It was closed, or has moved, by way of another front end; or the store has forgotten it.
            self._abandon(session)

    async def _begin_session(self, turn: Turn, wish: SessionWish, model: str) -> None:
        key = session_key(turn.owner, model, wish.id)
        binding = await self._store.get(key)
        session = self._sessions.get(key)
        is_gone = binding is None and self._store.is_available
        if session is not None and is_gone and session.bound_epoch is not None and not session.active:
            # It has expired, or another front end has closed it.
            self._abandon(session)
            session = None
        if session is None and binding is None and wish.action != "open":
            self.counts["unknown"] += 1
            return
        if session is None:
            epoch = await self._store.next_epoch() * EPOCH_STEP if binding is None else binding.epoch
            # Another turn may have come while we asked.
            session = self._sessions.get(key) or Session(key, turn.owner, wish.id, model, epoch, wish.timeout)
            self._sessions[key] = session
            self.counts["opened"] += binding is None
        if binding is not None and (session.bound_epoch is None or binding.epoch >= session.epoch):
            if session.worker is not None and session.epoch != binding.epoch:
                self._close_on_worker(session.worker, key, session.epoch)
            session.adopt(binding)
        if wish.action == "open":
            session.timeout = wish.timeout
            session.is_closing = False
        elif wish.action == "close":
            session.is_closing = turn.closes = True
        turn.state = "closed" if turn.closes else "open"
        turn.session = session
        session.active += 1
        self._active.add(session)
        if session.bound_epoch is not None and not await self._renew(session, binding):
            # It has just expired: whoever grants it a lease binds it anew.
            session.bound_epoch = None

    async def _renew(self, session: Session, binding: Binding | None) -> bool:
        """While a turn runs. A timeout that is new is written, too, for the other front ends."""
        seconds, bound_epoch = session.timeout + ACTIVE_MARGIN, session.bound_epoch
        assert bound_epoch is not None
        if binding is None or binding.timeout == session.timeout:
            return await self._store.renew(session.key, bound_epoch, seconds)
        changed = structs.replace(binding, timeout=session.timeout)
        return (await self._store.rebind(session.key, binding.epoch, changed, seconds, session.owner)).epoch == bound_epoch

    async def _bind(self, turn: Turn, session: Session) -> None:
        """Writes into the store where the session is; again, if it has moved and been granted meanwhile."""
        try:
            while session.bound_epoch != session.granted_epoch == session.epoch and self.is_open(session):
                await self._bind_once(turn, session)
        finally:
            session.binding = None

    async def _bind_once(self, turn: Turn, session: Session) -> None:
        """If somebody else was quicker, theirs counts, and our lease is given back."""
        worker, epoch = session.worker, session.epoch
        assert worker is not None
        binding = Binding(session.id, worker, session.model, epoch, session.timeout, time.time())
        seconds = session.timeout + ACTIVE_MARGIN
        if session.bound_epoch is None:
            winner = (await self._store.claim(session.key, binding, seconds, session.owner, self._quota)).binding
        else:
            winner = await self._store.rebind(session.key, session.bound_epoch, binding, seconds, session.owner)
        if winner is None:
            turn.state = "over_quota"
            self.counts["over_quota"] += 1
            self._close_on_worker(worker, session.key, epoch)
            self._forget(session)
        elif (winner.worker, winner.epoch) == (worker, epoch):
            session.bound_epoch = epoch
        else:
            self._close_on_worker(worker, session.key, epoch)
            session.adopt(winner)

    async def _bind_affinity(self, turn: Turn, key: str, known: Binding | None, worker: str) -> None:
        seconds = max(AFFINITY_SECONDS, turn.hints.retention_seconds)
        if known is not None and known.worker == worker:
            await self._store.renew(key, known.epoch, seconds)
            return
        binding = Binding("", worker, "", await self._store.next_epoch(), seconds, time.time())
        if known is None:
            await self._store.claim(key, binding, seconds)
        else:
            await self._store.rebind(key, known.epoch, binding, seconds)

    async def _close(self, session: Session) -> None:
        # First here: whoever opens it from now on opens another.
        self._abandon(session)
        if session.bound_epoch is not None:
            await self._store.release(session.key, session.bound_epoch)

    def _abandon(self, session: Session) -> None:
        """This incarnation is over: its lease is given back, when its last active turn has ended. One of another epoch is not touched."""
        if session.worker is not None:
            self._close_on_worker(session.worker, session.key, session.epoch)
        self._forget(session)

    def _close_on_worker(self, worker: str, key: str, epoch: int) -> None:
        member = self._pool.find(worker)
        if member is not None:
            member.link.close_session(key, epoch)

    def _forget(self, session: Session) -> None:
        if self.is_open(session):
            del self._sessions[session.key]
            self._on_end(session.key)

    def _list_expiry(self, session: Session) -> None:
        """One entry a session: when its time comes and the session has been used since, it is listed anew."""
        if session.is_listed:
            return
        session.is_listed = True
        self._pushed += 1
        heapq.heappush(self._expiries, (session.expires_at, self._pushed, session))
        self._some_expire.set()
        if len(self._expiries) > 2 * len(self._sessions) + 64:
            # Most of them were closed before their time.
            self._expiries = [entry for entry in self._expiries if self.is_open(entry[2])]
            heapq.heapify(self._expiries)

    async def _reap(self) -> None:
        """Ends sessions whose time has come."""
        while True:
            if not self._expiries:
                self._some_expire.clear()
                await self._some_expire.wait()
            now = self._clock()
            if self._expiries and self._expiries[0][0] <= now:
                await self._reap_one(heapq.heappop(self._expiries)[2], now)
            elif self._expiries:
                await asyncio.sleep(min(LONGEST_NAP, self._expiries[0][0] - now))

    async def _reap_one(self, session: Session, now: float) -> None:
        session.is_listed = False
        if not self.is_open(session) or self._is_in_use(session) or session.settling:
            return
        if session.expires_at > now:
            self._list_expiry(session)
            return
        binding = await self._store.get(session.key)
        if self._is_in_use(session) or session.settling or session.expires_at > now:
            # A turn of it has begun while we asked; one that has ended, too, has listed it anew, or will.
            return
        if not self._store.is_available or (binding is not None and binding.epoch == session.bound_epoch):
            # Another front end has had a turn of it since, or may have had: it, or the worker's own timer, will see to its end.
            self._forget(session)
            return
        self.counts["expired"] += 1
        self._abandon(session)

    def _is_in_use(self, session: Session) -> bool:
        return session.active > 0

    async def _keep_alive(self) -> None:
        """Renews what is in use: a turn that is running keeps its session alive, however long it takes."""
        while True:
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            for session in list(self._active):
                if session.bound_epoch is not None and self._is_in_use(session):
                    await self._store.renew(session.key, session.bound_epoch, session.timeout + ACTIVE_MARGIN)
                    if not self._is_in_use(session):
                        # Its last turn has ended meanwhile, and may have told the store before us.
                        session.settling += 1
                        await self._settle(session)

    def _spawn(self, coroutine: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s failed", task.get_name(), exc_info=task.exception())
