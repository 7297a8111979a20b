"""Which generations may have killed a worker, and how they are tried again, so that one request does not kill worker after worker.

When a worker dies, its generations become suspects. Suspects are tried: each worker gets one of them at a time, until that one has come
further than on the worker that died. If the worker dies before that, this suspect is accused and held back. If workers die while it is
held back, it is tried again; otherwise it is stopped. It is also stopped when it is accused MAX_ACCUSED times in a row: if several
requests kill workers at once, workers die while each of them is held back.
"""

from __future__ import annotations

import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.cluster.links.worker_link import WorkerLink
from penstock.cluster.sessions.turn import Turn
from penstock.wire.messages import Fault

log = logging.getLogger(__name__)

MAX_WORKERS_KILLED = 2
REMEMBERED_SECONDS = 60.0
HOLD_SECONDS = 5.0
# A trial is over after PROOF_TOKENS tokens more than the suspect had made on the worker that died. If these were over MAX_AGE_TOKENS, the
# first trial is over after PROOF_TOKENS: what kills at a certain place of the text kills soon after it is resumed there.
PROOF_TOKENS = 4
MAX_AGE_TOKENS = 32
# A request that is accused this many times in a row is stopped, even if other workers die without it.
MAX_ACCUSED = 3


class Suspect(Protocol):
    """A generation whose worker died."""

    model: str
    turn: Turn
    born: int
    """How many deaths there had been when it began."""
    died_at: int | None
    """How many tokens it had made on its last worker that died."""

    def __hash__(self) -> int: ...

    @property
    def links(self) -> Sequence[WorkerLink]:
        """Where it runs now: on two workers if one computes its prompt while the other one waits for it."""

    @property
    def age(self) -> int:
        """How many tokens it has made there."""

    def try_send(self) -> bool:
        """Sends it to a worker without a trial that has room. Returns whether it need not wait any more."""

    def send_soon(self) -> None:
        """Sends it, or puts it into the queue."""

    def hold(self, seconds: float) -> None:
        """Pauses it, and calls `judge` after that time."""

    def end_hold(self) -> None: ...

    def stop(self) -> None:
        """Ends it: it kills its workers."""

    def fail(self, fault: Fault) -> None: ...


class Trial(NamedTuple):
    """A suspect that runs alone among suspects, on this worker or on this and another one. It is cleared when it has made `proof` tokens;
    `age` is how many it had made on the worker that died. `ping` was sent just before it: a worker that did not answer was dead already."""

    suspect: Suspect
    proof: int
    age: int
    ping: int


class Death(NamedTuple):
    """A worker that was lost, and the trial that was held there."""

    number: int
    at: float
    link: WorkerLink
    trial: Trial | None


@dataclass(slots=True)
class _Case:
    """A suspect that waits for its trial: the tokens that it made on the worker that died, and those it must make to be cleared."""

    age: int
    proof: int
    since: float
    is_repeat: bool = False
    until: float | None = None
    """Set when there is a worker for it."""


class Suspects:
    """The suspects of one front end.

    A generation is suspected while its request was at more of the recent deaths since it began than it was not at, or if two of its
    workers in a row died at the same place. So where workers die for another reason, nobody is suspected for long. `usable` gives the
    links that take work for a model. `soon` does something after what is due already.
    """

    def __init__(
        self,
        usable: Callable[[str], Sequence[WorkerLink]],
        trial_seconds: float,
        soon: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._usable = usable
        self._trial_seconds = trial_seconds
        self._soon = soon
        self._clock = clock
        self.deaths = 0
        self.stopped = 0
        """Generations that were stopped."""
        self._recent: deque[Death] = deque()
        self._waiting: dict[Suspect, _Case] = {}
        self._held: dict[Suspect, bool] = {}
        """With whether its worker had other front ends."""
        self._trials: dict[WorkerLink, Trial] = {}
        self._is_review_due = False

    def __len__(self) -> int:
        """Suspects that wait for their trial."""
        return len(self._waiting)

    def __contains__(self, suspect: Suspect) -> bool:
        return suspect in self._waiting

    @property
    def models(self) -> set[str]:
        return {suspect.model for suspect in self._waiting}

    def is_free(self, link: WorkerLink) -> bool:
        """Whether nobody is on trial there."""
        return link not in self._trials

    def examine(self, suspect: Suspect, link: WorkerLink, age: int) -> bool:
        """The suspect had made `age` tokens on this link, whose worker died. False: it is not suspected, and goes on at once."""
        death, turn = self.record(link), suspect.turn
        trial = death.trial if death.trial is not None and death.trial.suspect is suspect else None
        if trial is not None and link.pongs < trial.ping:
            return False
        is_repeat = suspect.died_at is not None and _is_same_place(age, suspect.died_at)
        is_accused = trial is not None and _is_same_place(age, trial.age)
        suspect.died_at = age
        turn.deaths |= {death.number}
        turn.accused += is_accused
        guilt = self._guilt(suspect)
        if not self._trial_seconds or (guilt < 1 and not is_repeat):
            return False
        if is_accused and turn.accused >= MAX_ACCUSED:
            suspect.stop()
        elif is_accused and guilt >= MAX_WORKERS_KILLED:
            log.warning("several workers died while they ran the same generation: it waits at least %g s", HOLD_SECONDS)
            is_shared = self._held[suspect] = link.stats.other_front_ends > 0
            # The other front end's suspect is held, too: they must not meet again.
            suspect.hold(HOLD_SECONDS * (1 + random.random() * is_shared))  # noqa: S311, no secret
        else:
            is_short = age > MAX_AGE_TOKENS and guilt < MAX_WORKERS_KILLED and not is_repeat
            self._wait(suspect, age, PROOF_TOKENS if is_short else age + PROOF_TOKENS, is_repeat)
        return True

    def judge(self, suspect: Suspect) -> None:
        """It was held back, and no worker died without it. It is stopped; if a suspect of another front end may have killed its worker,
        it is tried once more."""
        if self._held.pop(suspect) and suspect.turn.accused < MAX_WORKERS_KILLED:
            self._wait_again(suspect)
        else:
            suspect.stop()

    def record(self, link: WorkerLink) -> Death:
        """The death of this link's worker, counted once."""
        for death in reversed(self._recent):
            if death.link is link:
                return death
        self._forget_old()
        self.deaths += 1
        self._recent.append(Death(self.deaths, self._clock(), link, self._trials.pop(link, None)))
        self._review_soon()
        return self._recent[-1]

    def left(self, link: WorkerLink) -> None:
        """This worker left without dying. A trial there is over."""
        if self._trials.pop(link, None) is not None:
            self.pump()

    def discard(self, suspect: Suspect) -> None:
        """It has ended, or its client has left."""
        self._waiting.pop(suspect, None)
        self._held.pop(suspect, None)

    def heard(self, link: WorkerLink) -> None:
        """A frame came from this worker: a trial there may be over."""
        trial = self._trials.get(link)
        if trial is None:
            return
        suspect = trial.suspect
        if link in suspect.links:
            if suspect.age < trial.proof:
                return
            suspect.turn.accused = 0
            self._trials = {place: each for place, each in self._trials.items() if each.suspect is not suspect}
        self.pump()

    def pump(self) -> None:
        """Begins trials where there is room: those first that had just begun when their worker died. One of each request at a time, and
        none while another one of it is held."""
        self._end_trials()
        for model in self.models:
            links = self._usable(model)
            if links:
                self._set_deadlines(model)
            while any(self.is_free(link) for link in links) and (suspect := self._next(model)) is not None and suspect.try_send():
                case = self._waiting.pop(suspect, None)
                if case is not None:
                    self._trials |= {link: Trial(suspect, case.proof, case.age, link.pings) for link in suspect.links}

    def _end_trials(self) -> None:
        """Ends those whose suspect has left the worker. `record` and `left` need those of lost workers."""
        self._trials = {link: trial for link, trial in self._trials.items() if link in trial.suspect.links or link.lost.done()}

    def tick(self) -> None:
        """Ends the wait of those whose trial does not come. From then on, the trials that run prove nothing."""
        self._forget_old()
        now = self._clock()
        late = [suspect for suspect, case in self._waiting.items() if case.until is not None and case.until <= now]
        if late:
            self._trials.clear()
        for suspect in late:
            del self._waiting[suspect]
            suspect.send_soon()
        self.pump()

    def fail(self, model: str, before: float, fault: Fault) -> None:
        """Ends those that have waited for a worker since before this time."""
        for suspect, case in list(self._waiting.items()):
            if suspect.model == model and case.since < before:
                suspect.fail(fault)

    def _wait(self, suspect: Suspect, age: int, proof: int, is_repeat: bool) -> None:
        self._waiting[suspect] = _Case(age, proof, self._clock(), is_repeat)
        self._review_soon()

    def _wait_again(self, suspect: Suspect) -> None:
        age = suspect.died_at or 0
        self._wait(suspect, age, age + PROOF_TOKENS, is_repeat=True)

    def _guilt(self, suspect: Suspect) -> int:
        """The recent deaths that its request was at, less those that it was not at."""
        since = [death.number in suspect.turn.deaths for death in self._recent if death.number > suspect.born]
        return 2 * sum(since) - len(since)

    def _review_soon(self) -> None:
        """After all generations of a dead worker were examined: each in its own call that is due already."""
        if not self._is_review_due:
            self._is_review_due = True
            self._soon(self._review)

    def _review(self) -> None:
        """A worker died without those that wait or are held: they may be free."""
        self._is_review_due = False
        for suspect in [suspect for suspect, case in self._waiting.items() if self._guilt(suspect) < 1 and not case.is_repeat]:
            del self._waiting[suspect]
            suspect.send_soon()
        for suspect in [suspect for suspect in self._held if self._guilt(suspect) < MAX_WORKERS_KILLED]:
            del self._held[suspect]
            suspect.end_hold()
            self._wait_again(suspect)
        self.pump()

    def _next(self, model: str) -> Suspect | None:
        busy = {id(suspect.turn) for suspect in [*self._held, *[trial.suspect for trial in self._trials.values()]]}
        found = [each for each in self._waiting if each.model == model and id(each.turn) not in busy]
        return min(found, key=lambda suspect: self._waiting[suspect].age, default=None)

    def _set_deadlines(self, model: str) -> None:
        for suspect, case in self._waiting.items():
            if case.until is None and suspect.model == model:
                case.until = self._clock() + self._trial_seconds

    def _forget_old(self) -> None:
        while self._recent and self._recent[0].at < self._clock() - REMEMBERED_SECONDS:
            self._recent.popleft()


def _is_same_place(age: int, before: int) -> bool:
    """A worker died when a generation had made `age` tokens there: right after it was resumed, or as far as it had come before."""
    return age <= PROOF_TOKENS or abs(age - before) <= PROOF_TOKENS
