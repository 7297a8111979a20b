"""A prompt that one worker computes for another: the place at the second one, while the first computes."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from penstock.cluster.pool import Member
from penstock.cluster.transfers import LEASE_SECONDS, Ending, Transfer, Transfers
from penstock.router.router import Assignment
from penstock.wire.messages import Export, Fetch, KvSource, SessionTurn, Submit


@dataclass(slots=True, eq=False)
class Relay:
    """A generation's place at the worker that will continue it. That worker pulls the prompt's blocks meanwhile.

    It ends in one of two ways: `take`, when the generation goes there, or `drop`.
    """

    transfers: Transfers
    transfer: Transfer
    member: Member
    assignment: Assignment
    session: SessionTurn | None

    def __post_init__(self) -> None:
        self.member.link.reserved += 1
        # The prompt is computed elsewhere.
        self.assignment.first_token()

    @property
    def is_alive(self) -> bool:
        """Whether the generation can go there. Its transfer may have ended: then that worker computes what it lacks."""
        return self.member.link.is_usable and not self.member.is_quiet

    def fetch(self, request: Submit) -> None:
        """Begins the pull, where it can begin before all is computed. Raises LinkError when the worker is lost."""
        if self.member.model.kv_handover != "blocks":
            return
        fetch = Fetch(self.transfer.message, request.token_ids, LEASE_SECONDS, request.root, request.lane, request.prompt)
        self.member.link.fetch(fetch)

    def take(self) -> KvSource | None:
        """The generation goes there now. Where its blocks are, unless the transfer has ended."""
        self._leave()
        if self.member.model.kv_handover == "ticket" and not self.transfer.ticket:
            self.transfers.end(self.transfer, "failed")
        if self.transfer.id not in self.transfers.open:
            return None
        if self.member.model.kv_handover != "meeting":
            self.transfers.was_computed(self.transfer)
        return self.transfer.message

    def drop(self, ending: Ending) -> None:
        """The generation will not go there."""
        self._leave()
        self.assignment.ended()
        self.transfers.end(self.transfer, ending)

    def _leave(self) -> None:
        self.member.link.reserved -= 1
        self.transfers.has_left(self.transfer)


def first_leg(request: Submit, transfer: Transfer) -> Submit:
    """The request as the worker gets it that computes the prompt: for one token, and without the lease of its session. Marked prompts are
    kept there too, since prompts that begin alike come there again. Of engines of others, the second one makes all tokens."""
    most, export = request.offset + (transfer.source.model.kv_handover == "blocks"), Export(transfer.id, LEASE_SECONDS)
    least = min(request.min_tokens, most)
    return structs.replace(request, max_tokens=most, min_tokens=least, retention_seconds=0.0, session=None, export=export)
