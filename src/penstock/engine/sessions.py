"""Sessions: leases on one agent's KV, from the opening to the close, the expiry or a newer incarnation."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.engine.config import EngineConfig
from penstock.engine.kv_cache import KVCache
from penstock.engine.lease import Lease
from penstock.wire.messages import SessionState, SessionTurn


@dataclass
class SessionUsage:
    """What one session has cost and saved so far."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class Session:
    """One incarnation of a session id. Turns hold on to it, so that the finish of an earlier incarnation cannot touch a later one."""

    __slots__ = ("active_turns", "epoch", "id", "is_closing", "is_over", "lease", "usage")

    def __init__(self, turn: SessionTurn, seconds: float) -> None:
        self.id = turn.id
        self.epoch = turn.epoch
        self.lease = Lease(seconds, is_session=True)
        self.active_turns = 0
        self.is_closing = False
        self.is_over = False
        self.usage = SessionUsage()

    @property
    def pages(self) -> int:
        return len(self.lease.nodes)


class Sessions:
    """So many at once as the settings allow. A grace is added to every timeout: a front end that lives closes its sessions before that.

    A turn that gets no session is served all the same, and is told why.
    """

    def __init__(self, cache: KVCache, config: EngineConfig) -> None:
        self._cache = cache
        self._quota = config.max_sessions
        self._grace = config.session_grace
        self._most_seconds = config.max_lease_seconds
        self._sessions: dict[str, Session] = {}
        # A heap by the end of each: (end, tie-breaker, lease).
        self._retained: list[tuple[float, int, Lease]] = []
        self._retentions = 0
        self.next_expiry = math.inf

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    @property
    def leases(self) -> list[Lease]:
        return [*(session.lease for session in self), *(lease for _, _, lease in self._retained)]

    def begin_turn(self, turn: SessionTurn) -> tuple[Session | None, SessionState]:
        """The turn is active from now on, be it queued or running; while one is, the lease does not run."""
        session = self._sessions.get(turn.id)
        if turn.action == "open":
            session = self._open(turn, session)
            if session is None:
                return None, "over_quota"
        if session is None or session.epoch != turn.epoch:
            return None, "unknown"
        if turn.action == "close":
            session.is_closing = True
        session.active_turns += 1
        session.lease.ends_at = math.inf
        session.usage.turns += 1
        return session, "open"

    def end_turn(self, session: Session, now: float) -> None:
        """The lease slides from the end of the last active turn; a close that was put off is carried out."""
        session.active_turns -= 1
        if session.is_over or session.active_turns:
            return
        if session.is_closing:
            self._end(session)
        else:
            session.lease.ends_at = now + session.lease.seconds + self._grace
            self.next_expiry = min(self.next_expiry, session.lease.ends_at)

    def close(self, session_id: str, epoch: int) -> bool:
        """Closes it now, or when its last active turn ends. Returns whether there was one: that of another epoch is left alone."""
        session = self._sessions.get(session_id)
        if session is None or session.epoch != epoch:
            return False
        session.is_closing = True
        if not session.active_turns:
            self._end(session)
        return True

    def retain(self, lease: Lease) -> None:
        """Remembers a lease without a session until its end."""
        self._retentions += 1
        heapq.heappush(self._retained, (lease.ends_at, self._retentions, lease))
        self.next_expiry = min(self.next_expiry, lease.ends_at)
        if len(self._retained) > 2 * self._cache.pages + 64:
            # Most have lost their nodes to others or to eviction: at most one a page is left.
            self._retained = [entry for entry in self._retained if entry[2].nodes]
            heapq.heapify(self._retained)

    def expire(self, now: float) -> None:
        """Ends what has run out. Retained KV becomes ordinary; a session's own is freed, as by a close."""
        if now < self.next_expiry:
            return
        for session in [session for session in self if session.lease.ends_at <= now]:
            self._end(session)
        while self._retained and self._retained[0][0] <= now:
            self._cache.end_lease(heapq.heappop(self._retained)[2], free_exclusive=False)
        ends = [session.lease.ends_at for session in self] + [entry[0] for entry in self._retained[:1]]
        self.next_expiry = min(ends, default=math.inf)

    def _open(self, turn: SessionTurn, session: Session | None) -> Session | None:
        if session is not None and session.epoch >= turn.epoch:
            if session.epoch == turn.epoch:
                session.is_closing = False
                session.lease.seconds = self._seconds(turn)
            return session
        if session is not None:
            self._end(session)
        elif len(self._sessions) >= self._quota:
            return None
        session = self._sessions[turn.id] = Session(turn, self._seconds(turn))
        return session

    def _seconds(self, turn: SessionTurn) -> float:
        """What is no sensible time is none, or the longest."""
        return min(turn.timeout, self._most_seconds) if turn.timeout > 0 else 0.0

    def _end(self, session: Session) -> None:
        session.is_over = True
        del self._sessions[session.id]
        self._cache.end_lease(session.lease, free_exclusive=True)
