"""One request on its way to the workers: its session, the worker it prefers, and what happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import structs

from penstock.kv.blocks import block_hash_pieces, block_hashes
from penstock.router.affinity import Binding
from penstock.router.policy import Decision, Hints, Preference
from penstock.wire.messages import Mark, PromptReport, SessionTurn, Tier

if TYPE_CHECKING:
    from penstock.cluster.sessions.sessions import Sessions


@dataclass(slots=True, eq=False)
class Session:
    """One incarnation of a session, as this front end knows it. Its turns share it.

    `binding` says where its turns go; its worker is empty until the first turn is sent. `granted_epoch` is the last epoch for which
    the worker gave a lease, `bound_epoch` the epoch that the store has. `active` counts running turns. `settling` counts the tasks
    that tell the store about the end of the last turn.
    """

    key: str
    owner: str
    binding: Binding
    granted_epoch: int | None = None
    bound_epoch: int | None = None
    binding_task: asyncio.Task[None] | None = None
    active: int = 0
    settling: int = 0
    is_closing: bool = False

    @property
    def place(self) -> tuple[str, int]:
        """The worker and the epoch."""
        return self.binding.worker, self.binding.epoch

    def adopt(self, binding: Binding) -> None:
        """Takes over what the store says."""
        self.binding = binding
        self.bound_epoch = self.granted_epoch = binding.epoch

    def move(self, worker: str, epoch: int) -> None:
        self.binding = structs.replace(self.binding, worker=worker, epoch=epoch)

    def change_timeout(self, seconds: float) -> None:
        self.binding = structs.replace(self.binding, timeout=seconds)


@dataclass(slots=True, eq=False)
class Turn:
    """One request on its way to the workers.

    `state` is what the answer says about the session: open, moved, diverted, closed, over_quota or unknown. `affinity` and `parent`
    are what its key and its parent session are bound to.
    """

    sessions: Sessions
    owner: str
    hints: Hints
    session: Session | None = None
    state: str = "unknown"
    closes: bool = False
    worker: str | None = None
    cached_tokens: int = 0
    retained: tuple[Mark, ...] = ()
    tier: Tier | None = None
    decisions: list[tuple[int, Decision]] = field(default_factory=list)
    deaths: frozenset[int] = frozenset()
    """The deaths of workers at which it was there: see `cluster/suspects.py`."""
    accused: int = 0
    """How many times in a row a worker died while one of its generations was on trial there."""
    affinity_key: str | None = None
    affinity: Binding | None = None
    parent: Binding | None = None
    _has_followed: bool = False
    # Where its session was before it moved.
    _left: list[tuple[str, int]] = field(default_factory=list)
    _names: dict[int, tuple[int, Sequence[bytes]]] = field(default_factory=dict)

    async def name_blocks(
        self, prompts: Iterable[tuple[int, ...]], block_size: int, root: bytes, loop_turn: Callable[[], Awaitable[None]]
    ) -> None:
        """Names the blocks of long prompts before the router asks. Others go on meanwhile: 200,000 tokens take 10 ms."""
        for token_ids in prompts:
            names: list[bytes] = []
            for piece in block_hash_pieces(token_ids, block_size, root):
                names += piece
                await loop_turn()
            self._names[id(token_ids)] = block_size, names

    def block_names(self, token_ids: tuple[int, ...], block_size: int, root: bytes) -> Sequence[bytes]:
        """The names of a prompt's blocks. Kept for the other choices of the same prompt: all of a turn have the same root.

        The prompts of a request live as long as its turn, so an id stands for one of them.
        """
        size, names = self._names.get(id(token_ids), (0, ()))
        if size != block_size:
            names = block_hashes(token_ids, block_size, root)
            self._names[id(token_ids)] = block_size, names
        return names

    @property
    def preference(self) -> tuple[str | None, Preference]:
        """The worker to go to, and why."""
        if self.session is not None and self.session.binding.worker:
            return self.session.binding.worker, "session"
        if self.affinity is not None:
            return self.affinity.worker, "affinity"
        return None if self.parent is None else self.parent.worker, "parent"

    @property
    def settling(self) -> asyncio.Future[None] | None:
        """Ends when the session is bound; None when it is. The answer must not end before: the client's next turn may come to another
        front end at once."""
        return None if self.session is None else self.session.binding_task

    def sent(self, choice: int, decision: Decision) -> SessionTurn | None:
        """A generation goes to the worker of this decision. Returns the session fields for the worker.

        If the session's worker is gone, the session moves. If it is only busy, this generation runs elsewhere without the lease.
        """
        self.decisions.append((choice, decision))
        session = self.session
        if session is None or not self.sessions.is_open(session):
            return None
        worker, epoch = session.place
        if not worker:
            session.move(decision.worker, epoch)
        elif worker != decision.worker:
            if decision.diverted != "gone":
                self.state = "diverted"
                return None
            if self.closes:
                # The lease that it would close is gone with its worker.
                return None
            session.move(decision.worker, epoch + 1)
            self._left.append((worker, epoch))
            self.state = "moved"
            self.sessions.counts["moved"] += 1
        binding = session.binding
        # What no worker has granted yet is opened first. It is closed after this turn.
        closes = self.closes and session.granted_epoch == binding.epoch
        return SessionTurn(session.key, "close" if closes else "open", binding.timeout, binding.epoch)

    def reported(self, worker: str, sent: SessionTurn | None, report: PromptReport) -> None:
        """A worker has computed the prompt. `sent` has the session fields that it got; the report says whether it granted a lease."""
        self.forget_left()
        if self.worker is None:
            self.cached_tokens = report.cached_tokens
        self.worker, self.retained, self.tier = worker, report.retained, report.tier
        if sent is not None and self.session is not None:
            if report.session == "open":
                self.sessions.granted(self, self.session, worker, sent.epoch)
            elif report.session is not None:
                self.state = report.session
                self.sessions.counts[report.session] += 1
        if self.affinity_key is not None and not self._has_followed:
            self._has_followed = True
            self.sessions.follow_affinity(self, self.affinity_key, worker)

    def forget_left(self) -> None:
        """The session's KV has moved, or will not. A worker that drains need not keep it any longer, and may end."""
        session = self.session
        while session is not None and self._left:
            worker, epoch = self._left.pop()
            self.sessions.end_on_worker(worker, session.key, epoch)

    def prefilled(self, worker: str, report: PromptReport) -> None:
        """A worker has computed the prompt for another one, which will have the session and all that follows."""
        if self.worker is None:
            self.worker, self.cached_tokens = worker, report.cached_tokens
            self.retained, self.tier = report.retained, report.tier

    def describe_session(self) -> dict[str, object] | None:
        """What the answer tells about the session; None for a request without one."""
        wish = self.hints.session
        if wish is None:
            return None
        remaining = None
        if self.state == "closed":
            remaining = 0.0
        elif self.session is not None and self.state in ("open", "moved", "diverted"):
            remaining = self.session.binding.timeout
        return {
            "id": wish.id,
            "state": self.state,
            "worker": self.worker,
            "cached_tokens": self.cached_tokens,
            "expires_in": remaining,
            "retained_until": int(time.time() + remaining) if remaining and self.tier is not None and self.state != "diverted" else None,
            "tier": self.tier if remaining and self.state != "diverted" else None,
        }

    def describe_retained(self) -> list[dict[str, object]]:
        """What the answer tells about the parts of its prompt that a worker keeps without a session."""
        now = time.time()
        kept = [mark for mark in self.retained if mark.tokens]
        return [{"tokens": mark.tokens, "retained_until": int(now + mark.seconds), "tier": self.tier} for mark in kept]

    def describe_route(self, *, has_costs: bool) -> list[dict[str, object]]:
        """Every decision, in order. A choice that migrated has more than one."""
        return [_described(choice, decision) | ({"cost": decision.cost} if has_costs else {}) for choice, decision in self.decisions]


def _described(choice: int, decision: Decision) -> dict[str, object]:
    described: dict[str, object] = {
        "choice": choice,
        "worker": decision.worker,
        "reason": decision.reason,
        "diverted": decision.diverted,
        "overlap_blocks": decision.overlap,
    }
    if decision.move is not None:
        described["kv_from"] = {"worker": decision.move.worker, "reason": decision.move.reason}
    return described
