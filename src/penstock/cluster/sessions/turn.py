"""A request on its way to the workers: the session that it is a turn of, where it would like to go, and what became of that."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.kv.blocks import block_hashes
from penstock.router.affinity import Binding
from penstock.router.policy import Decision, Hints, Preference
from penstock.wire.messages import PromptReport, SessionTurn

if TYPE_CHECKING:
    from penstock.cluster.sessions.sessions import Sessions


class Session:
    """One incarnation of a session as this front end knows it, shared by its turns.

    `worker` and `epoch` say where its turns go; `granted_epoch` is the last for which that worker gave a lease, `bound_epoch` the one
    in the store. So many turns are `active`; when the last has ended, the store is still to be told: so many times it is `settling`.
    """

    __slots__ = (
        "active",
        "binding",
        "bound_epoch",
        "epoch",
        "expires_at",
        "granted_epoch",
        "id",
        "is_closing",
        "is_listed",
        "key",
        "model",
        "owner",
        "settling",
        "timeout",
        "worker",
    )

    def __init__(self, key: str, owner: str, session_id: str, model: str, epoch: int, timeout: float) -> None:
        self.key = key
        self.owner = owner
        self.id = session_id
        self.model = model
        self.epoch = epoch
        self.timeout = timeout
        self.worker: str | None = None
        self.granted_epoch: int | None = None
        self.bound_epoch: int | None = None
        self.binding: asyncio.Task[None] | None = None
        self.active = 0
        self.settling = 0
        self.is_closing = False
        self.is_listed = False
        self.expires_at = 0.0

    def adopt(self, binding: Binding) -> None:
        """The store knows better."""
        self.worker = binding.worker
        self.timeout = binding.timeout
        self.epoch = self.bound_epoch = self.granted_epoch = binding.epoch


class Turn:
    """One request on its way to the workers: where its generations would like to go, and what became of them."""

    __slots__ = (
        "_affinity",
        "_has_followed",
        "_names",
        "_parent",
        "_sessions",
        "affinity_key",
        "cached_tokens",
        "closes",
        "decisions",
        "hints",
        "owner",
        "session",
        "state",
        "worker",
    )

    def __init__(self, sessions: Sessions, owner: str, hints: Hints) -> None:
        self._sessions = sessions
        self.owner = owner
        self.hints = hints
        self.session: Session | None = None
        self.state = "unknown"
        self.closes = False
        self.worker: str | None = None
        self.cached_tokens = 0
        self.decisions: list[tuple[int, Decision]] = []
        self.affinity_key: str | None = None
        self._affinity: Binding | None = None
        self._has_followed = False
        self._parent: Binding | None = None
        self._names: tuple[tuple[int, ...], int, Sequence[bytes]] = ((), 0, ())

    def block_names(self, token_ids: tuple[int, ...], block_size: int) -> Sequence[bytes]:
        """Those of a prompt's KV blocks. Choices of one prompt share it, and ask for the same."""
        known, size, names = self._names
        if known is not token_ids or size != block_size:
            names = block_hashes(token_ids, block_size)
            self._names = token_ids, block_size, names
        return names

    @property
    def preference(self) -> tuple[str | None, Preference]:
        """The worker to go to, and why."""
        if self.session is not None and self.session.worker is not None:
            return self.session.worker, "session"
        if self._affinity is not None:
            return self._affinity.worker, "affinity"
        return None if self._parent is None else self._parent.worker, "parent"

    @property
    def settling(self) -> asyncio.Future[None] | None:
        """The binding that is under way. The next turn may come to another front end, as soon as this one has ended."""
        return None if self.session is None else self.session.binding

    def sent(self, choice: int, decision: Decision) -> SessionTurn | None:
        """A generation goes to the worker of this decision. Returns what the worker is told of its session.

        When the session's worker is gone, the session moves; when that is only busy, this generation goes without its lease.
        """
        self.decisions.append((choice, decision))
        session = self.session
        if session is None or not self._sessions.is_open(session):
            return None
        if session.worker is None:
            session.worker = decision.worker
        elif session.worker != decision.worker:
            if decision.diverted != "gone":
                self.state = "diverted"
                return None
            if self.closes:
                # What it would close is gone with its worker.
                return None
            session.worker = decision.worker
            session.epoch += 1
            self.state = "moved"
            self._sessions.count("moved")
        return SessionTurn(session.key, "close" if self.closes else "open", session.timeout, session.epoch)

    def reported(self, worker: str, sent: SessionTurn | None, report: PromptReport) -> None:
        """A worker has computed the prompt, and says what became of the session that it was told of."""
        if self.worker is None:
            self.cached_tokens = report.cached_tokens
        self.worker = worker
        if sent is not None and self.session is not None:
            if report.session == "open":
                self._sessions.granted(self, self.session, worker, sent.epoch)
            elif report.session is not None:
                self.state = report.session
                self._sessions.count(report.session)
        if self.affinity_key is not None and not self._has_followed:
            self._has_followed = True
            self._sessions.follow_affinity(self, self.affinity_key, self._affinity, worker)

    def describe_session(self) -> dict[str, object] | None:
        """What the answer of a session's turn says of it."""
        wish = self.hints.session
        if wish is None:
            return None
        remaining = None
        if self.state == "closed":
            remaining = 0.0
        elif self.session is not None and self.state in ("open", "moved", "diverted"):
            remaining = self.session.timeout
        return {
            "id": wish.id,
            "state": self.state,
            "worker": self.worker,
            "cached_tokens": self.cached_tokens,
            "expires_in": remaining,
        }

    def describe_route(self) -> list[dict[str, object]]:
        """Every decision that was taken for it, in their order: more than one a choice when it migrated."""
        return [_described(choice, decision) for choice, decision in self.decisions]

    def prefer(self, affinity: Binding | None, parent: Binding | None) -> None:
        self._affinity, self._parent = affinity, parent


def _described(choice: int, decision: Decision) -> dict[str, object]:
    return {
        "choice": choice,
        "worker": decision.worker,
        "reason": decision.reason,
        "diverted": decision.diverted,
        "overlap_blocks": decision.overlap,
        "cost": decision.cost,
    }
