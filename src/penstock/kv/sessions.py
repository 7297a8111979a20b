"""Sessions: leases on one agent's KV, from the opening to the close, the expiry or a newer incarnation."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.kv.config import EngineConfig
from penstock.kv.lease import Lease
from penstock.kv.radix import Node
from penstock.wire.messages import SessionReport, SessionState, SessionTurn


class LeasedCache(Protocol):
    """What sessions ask of the cache that their leases are on."""

    @property
    def pages(self) -> int: ...

    def retain(self, path: Sequence[Node], lease: Lease) -> None:
        """A lease on these nodes."""

    def end_lease(self, lease: Lease, *, free_exclusive: bool) -> int:
        """What it held becomes ordinary; or, where nobody else holds it, free. Returns how many pages became free."""


@dataclass
class SessionUsage:
    """What one session has cost and saved so far."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def count(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int) -> None:
        """A turn has ended."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.generated_tokens += generated_tokens


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

    def report(self, now: float, grace: float) -> SessionReport:
        """`expires_in` is the client's time: without the grace that the worker adds."""
        usage, ends_at = self.usage, self.lease.ends_at
        return SessionReport(
            id=self.id,
            epoch=self.epoch,
            kv_blocks=self.pages,
            turns=usage.turns,
            active_turns=self.active_turns,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            generated_tokens=usage.generated_tokens,
            expires_in=None if self.active_turns else max(0.0, ends_at - grace - now),
        )


class Sessions:
    """So many at once as the settings allow. A grace is added to every timeout: a front end that lives closes its sessions before that.

    A turn that gets no session is served all the same, and is told why.
    """

    def __init__(self, cache: LeasedCache, config: EngineConfig) -> None:
        self._cache = cache
        self._quota = config.max_sessions
        self._grace = config.session_grace
        self._most_seconds = config.max_lease_seconds
        self._sessions: dict[str, Session] = {}
        # Heaps by the end of each: (end, tie-breaker, what ends). That of the sessions may be out of date: every turn leaves an entry.
        self._idle: list[tuple[float, int, Session]] = []
        self._retained: list[tuple[float, int, Lease]] = []
        self._entries = 0
        self.next_expiry = math.inf

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def describe(self, session_ids: Iterable[str], now: float) -> list[SessionReport]:
        """Those of them that there are."""
        sessions = [self._sessions.get(session_id) for session_id in session_ids]
        return [session.report(now, self._grace) for session in sessions if session is not None]

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
            self._await_end(session)

    def close(self, session_id: str, epoch: int) -> bool:
        """Closes it now, or when its last active turn ends. Returns whether there was one: that of another epoch is left alone."""
        session = self._sessions.get(session_id)
        if session is None or session.epoch != epoch:
            return False
        session.is_closing = True
        if not session.active_turns:
            self._end(session)
        return True

    def retain(self, path: Sequence[Node], seconds: float, now: float) -> None:
        """A lease without a session on these nodes, remembered until its end. No time at all is none."""
        if not (path and seconds > 0):
            return
        seconds = min(seconds, self._most_seconds)
        lease = Lease(seconds, now + seconds)
        self._cache.retain(path, lease)
        self._entries += 1
        heapq.heappush(self._retained, (lease.ends_at, self._entries, lease))
        self.next_expiry = min(self.next_expiry, lease.ends_at)
        if len(self._retained) > 2 * self._cache.pages + 64:
            # Most have lost their nodes to others or to eviction: at most one a page is left.
            self._retained = [entry for entry in self._retained if entry[2].nodes]
            heapq.heapify(self._retained)

    def expire(self, now: float) -> None:
        """Ends what has run out. Retained KV becomes ordinary; a session's own is freed, as by a close."""
        if now < self.next_expiry:
            return
        while self._idle and (self._idle[0][0] <= now or not self._is_current(self._idle[0])):
            entry = heapq.heappop(self._idle)
            if self._is_current(entry):
                self._end(entry[2])
        while self._retained and self._retained[0][0] <= now:
            self._cache.end_lease(heapq.heappop(self._retained)[2], free_exclusive=False)
        self.next_expiry = min([entry[0] for entry in (*self._idle[:1], *self._retained[:1])], default=math.inf)

    def _await_end(self, session: Session) -> None:
        self._entries += 1
        heapq.heappush(self._idle, (session.lease.ends_at, self._entries, session))
        self.next_expiry = min(self.next_expiry, session.lease.ends_at)
        if len(self._idle) > 2 * len(self._sessions) + 64:
            current = {entry[2].id: entry for entry in self._idle if self._is_current(entry)}
            self._idle = list(current.values())
            heapq.heapify(self._idle)

    def _is_current(self, entry: tuple[float, int, Session]) -> bool:
        """Nothing has happened to the session since the entry was made."""
        ends_at, _, session = entry
        return not session.is_over and session.lease.ends_at == ends_at

    def _open(self, turn: SessionTurn, session: Session | None) -> Session | None:
        if session is not None and session.epoch >= turn.epoch:
            if session.epoch == turn.epoch:
                session.is_closing = False
                session.lease.seconds = self._seconds(turn)
            return session
        if session is None and len(self._sessions) >= self._quota:
            return None
        opened = self._sessions[turn.id] = Session(turn, self._seconds(turn))
        if session is not None:
            # The same agent, back after its front end forgot it: it has come for what the earlier incarnation left.
            session.is_over = True
            opened.lease = session.lease
            opened.lease.seconds = self._seconds(turn)
        return opened

    def _seconds(self, turn: SessionTurn) -> float:
        """What is no sensible time is none, or the longest."""
        return min(turn.timeout, self._most_seconds) if turn.timeout > 0 else 0.0

    def _end(self, session: Session) -> None:
        session.is_over = True
        del self._sessions[session.id]
        self._cache.end_lease(session.lease, free_exclusive=True)
