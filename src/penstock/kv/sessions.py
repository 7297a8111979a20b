"""Sessions on a worker: each leases one agent's KV until it is closed, expires or is opened again."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from msgspec import structs

from penstock.kv.cache import KVCache
from penstock.kv.radix import Key, Lease, Node
from penstock.lazy_heap import LazyHeap
from penstock.wire.images import ImageSpan, whole_images
from penstock.wire.messages import SessionReport, SessionState, SessionTurn, Tier

MAX_LEASE_SECONDS = 86_400.0
TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass
class SessionUsage:
    """The tokens of one session so far."""

    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def count(self, prompt_tokens: int, cached_tokens: int, generated_tokens: int) -> None:
        """Adds an ended turn."""
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.generated_tokens += generated_tokens


class Session:
    """One epoch of a session id. Turns keep a reference to it, so that the end of an earlier epoch's turn does not touch a later epoch."""

    __slots__ = (
        "active_turns",
        "branches",
        "ended_turns",
        "epoch",
        "frees",
        "id",
        "images",
        "is_closing",
        "is_over",
        "lane",
        "lease",
        "usage",
    )

    def __init__(self, turn: SessionTurn, seconds: float, lane: str) -> None:
        self.id = turn.id
        self.lane = lane
        self.epoch = turn.epoch
        self.lease = Lease(seconds, is_session=True)
        self.active_turns = 0
        self.is_closing = False
        self.frees = False  # when it closes
        self.is_over = False
        self.usage = SessionUsage()
        self.images: tuple[ImageSpan, ...] = ()
        """Those of the last turn that ended."""
        # The last nodes of ended turns that no later turn has superseded, each with the number of turns that had ended by then.
        self.branches: list[tuple[int, Node]] = []
        self.ended_turns = 0

    @property
    def pages(self) -> int:
        return len(self.lease.nodes)

    def report(self, now: float, grace: float, tier: Tier | None) -> SessionReport:
        """`expires_in` is what the client may count on: without the worker's grace."""
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
            tier=tier,
        )

    def with_tokens(self, report: SessionReport) -> SessionReport:
        """With the tokens of the longest path that it leases."""
        node = max(self.lease.nodes, key=lambda node: node.depth, default=None)
        keys: list[Key] = []
        while node is not None and node.parent is not None:
            keys.append(node.key)
            node = node.parent
        token_ids, images = tuple(itertools.chain.from_iterable(reversed(keys))), self.images
        if images:
            token_ids, images = whole_images(token_ids, images)
        return structs.replace(report, token_ids=token_ids, root=b"" if node is None else node.name, lane=self.lane, images=images)


class Sessions:
    """At most `max_sessions` at a time. `grace_seconds` is added to every timeout: a live front end closes its sessions before that.

    A turn that gets no session is served without one; its state says why. If all sessions are taken, a tenant below its share
    (`max_sessions` divided by the number of tenants with sessions) still gets one: the tenant with the most loses the idle one that would
    end first. The KV of that one stays cached, without a lease. `cache` is None for an engine with its own KV cache: then sessions open
    and expire, but hold no KV.
    """

    def __init__(self, cache: KVCache | None, max_sessions: int, grace_seconds: float) -> None:
        self._cache = cache
        self._max_sessions = max_sessions
        self._grace_seconds = grace_seconds
        self._sessions: dict[str, Session] = {}
        self._lanes: Counter[str] = Counter()
        self.evicted = 0
        # By the end of each: sessions without an active turn, and leases without a session.
        self._idle: LazyHeap[Session, float] = LazyHeap()
        self._retained: LazyHeap[Lease, float] = LazyHeap()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def describe(self, session_ids: Iterable[str], now: float, *, with_tokens: bool = False) -> list[SessionReport]:
        """Reports on the known ones of these sessions."""
        sessions = [self._sessions.get(session_id) for session_id in session_ids]
        reports = [(each, each.report(now, self._grace_seconds, self._tier(each))) for each in sessions if each is not None]
        return [session.with_tokens(report) if with_tokens else report for session, report in reports]

    def _tier(self, session: Session) -> Tier | None:
        """The slowest tier that has a part of its KV. Every tier gives up the ends of chains first, so it is the tier of an end."""
        if self._cache is None:
            return None
        found: list[Tier] = ["device"] if session.pages else []
        for _, last in session.branches if self._cache.below is not None else ():
            node: Node | None = last
            while node is not None and (tier := self._cache.tier_of(node.name)) is None:
                node = node.parent
            found += [] if node is None or tier is None else [tier]
        return max(found, key=TIERS.index, default=None)

    @property
    def leases(self) -> list[Lease]:
        return [*(session.lease for session in self), *self._retained]

    @property
    def next_expiry(self) -> float:
        """When the next lease ends, unless it is renewed before; infinity when there is none."""
        return min([least[0] for heap in (self._idle, self._retained) if (least := heap.least()) is not None], default=math.inf)

    def begin_turn(self, turn: SessionTurn | None, lane: str = "") -> tuple[Session | None, SessionState | None]:
        """The turn is active from now on, queued or running. While a turn is active, the lease does not end. None: no session.

        `lane` is the tenant's, see Submit.
        """
        if turn is None:
            return None, None
        session = self._sessions.get(turn.id)
        if turn.action == "open":
            session = self._open(turn, session, lane)
            if session is None:
                return None, "over_quota"
        if session is None or session.epoch != turn.epoch:
            return None, "unknown"
        if turn.action == "close":
            session.is_closing = session.frees = True
        session.active_turns += 1
        session.lease.ends_at = math.inf
        session.usage.turns += 1
        self._idle.discard(session)
        return session, "open"

    def end_turn(self, session: Session, now: float) -> None:
        """The lease starts to run when the last active turn ends. A close that waited for this is carried out."""
        session.active_turns -= 1
        if session.is_over or session.active_turns:
            return
        if session.is_closing:
            self._end(session, free_exclusive=session.frees)
        else:
            session.lease.ends_at = now + session.lease.seconds + self._grace_seconds
            self._idle.put(session, session.lease.ends_at)

    def supersede(self, session: Session, since: int, path: Sequence[Node], others: Sequence[Sequence[Node]]) -> None:
        """A turn has computed its whole prompt and ended with this path. When it began, `since` turns of the session had ended.

        The path is the conversation from now on. Everything else that the session leases loses its lease at once: an answer that was
        not continued, thinking that was left out, history that was shortened. Parallel turns are spared: the branches of turns that
        ended after this one began, and `others`, the paths of running turns. While a turn of the session waits, its path is unknown,
        and everything keeps its lease.
        """
        if self._cache is None or session.is_over:
            return
        kept = session.branches
        is_certain = len(others) == session.active_turns - 1
        if is_certain:
            kept = [branch for branch in kept if branch[0] > since]
        is_newer = len(kept) < len(session.branches)
        session.ended_turns += 1
        session.branches = [*kept, (session.ended_turns, path[-1])]
        if is_newer and (session.pages > len(path) or self._cache.below is not None):
            nodes = set(path).union(*others)
            for _, last in kept:
                node: Node | None = last
                while node is not None and node not in nodes:
                    nodes.add(node)
                    node = node.parent
            self._cache.demote(session.lease, nodes)

    def close(self, session_id: str, epoch: int, *, frees: bool = True) -> bool:
        """Closes it now, or when its last active turn ends. Returns whether it was there; a session of another epoch is left alone."""
        session = self._sessions.get(session_id)
        if session is None or session.epoch != epoch:
            return False
        session.is_closing = True
        session.frees |= frees
        if not session.active_turns:
            self._end(session, free_exclusive=session.frees)
        return True

    def retain(self, path: Sequence[Node], seconds: float, now: float) -> None:
        """Leases these nodes without a session. Zero seconds: no lease."""
        if self._cache is None or not (path and seconds > 0):
            return
        seconds = min(seconds, MAX_LEASE_SECONDS)
        ends_at = now + seconds
        if any(not lease.is_session and lease.ends_at >= ends_at - seconds / 100 for lease in path[-1].leases or ()):
            # Another choice of the same request has just done so. The nodes before the last are leased at least as long.
            return
        lease = Lease(seconds, ends_at)
        self._cache.retain(path, lease)
        self._retained.put(lease, lease.ends_at)
        if len(self._retained) > 2 * self._cache.pages:
            # Most have lost their nodes to other leases or to eviction: at most one per page has any.
            for empty in [lease for lease in self._retained if not lease.nodes]:
                self._retained.discard(empty)
                self._end_lease(empty, free_exclusive=False)

    def expire(self, now: float) -> None:
        """Ends what has run out. Its KV loses the lease, and stays cached while there is room."""
        while (session := self._idle.pop_due(now)) is not None:
            self._end(session, free_exclusive=False)
        while (lease := self._retained.pop_due(now)) is not None:
            self._end_lease(lease, free_exclusive=False)

    def _open(self, turn: SessionTurn, session: Session | None, lane: str) -> Session | None:
        if session is not None and session.epoch >= turn.epoch:
            if session.epoch == turn.epoch:
                session.is_closing = session.frees = False
                session.lease.seconds = _lease_seconds(turn)
            return session
        if session is None and len(self._sessions) >= self._max_sessions and not self._make_room(lane):
            return None
        opened = self._sessions[turn.id] = Session(turn, _lease_seconds(turn), lane)
        self._lanes[lane] += 1
        if session is not None:
            self._leave_lane(session)
            # The same agent, back after its front end forgot it: the new session takes over what the earlier one holds.
            session.is_over = True
            self._idle.discard(session)
            opened.lease = session.lease
            opened.lease.seconds = _lease_seconds(turn)
            opened.branches, opened.ended_turns = session.branches, session.ended_turns
        return opened

    def _make_room(self, lane: str) -> bool:
        """Ends an idle session of a tenant above its share, for a tenant below it. Returns whether there was one."""
        lanes = self._lanes
        own = lanes.get(lane, 0)
        share = self._max_sessions / (len(lanes) + (not own))
        if own and own + 1 > share:
            return False
        above = [session for session in self._idle if lanes[session.lane] > max(share, own + 1)]
        session = max(above, key=lambda session: (lanes[session.lane], -self._idle.priority(session)), default=None)
        if session is not None:
            self.evicted += 1
            self._end(session, free_exclusive=False)
        return session is not None

    def _leave_lane(self, session: Session) -> None:
        self._lanes[session.lane] -= 1
        if not self._lanes[session.lane]:
            del self._lanes[session.lane]

    def _end(self, session: Session, *, free_exclusive: bool) -> None:
        session.is_over = True
        self._idle.discard(session)
        del self._sessions[session.id]
        self._leave_lane(session)
        self._end_lease(session.lease, free_exclusive=free_exclusive)

    def _end_lease(self, lease: Lease, *, free_exclusive: bool) -> None:
        if self._cache is not None:
            self._cache.end_lease(lease, free_exclusive=free_exclusive)


def _lease_seconds(turn: SessionTurn) -> float:
    """Clamped to [0, MAX_LEASE_SECONDS]; NaN is 0."""
    return min(turn.timeout, MAX_LEASE_SECONDS) if turn.timeout > 0 else 0.0
