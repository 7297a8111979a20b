"""Dispatch: sends a generation to a worker, and to another one when that fails."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from msgspec import structs

from penstock.cluster.links.worker_link import Generation, WorkerLink, WorkerReport
from penstock.cluster.pool import Member, WorkerPool
from penstock.cluster.relay import Relay, first_leg
from penstock.cluster.sessions.turn import Turn
from penstock.cluster.suspects import Suspects
from penstock.cluster.transfers import Ending, Transfer, Transfers
from penstock.cluster.waiting import WaitingQueue, may_wait
from penstock.config.front_end import DispatchLimits
from penstock.fairness import cost_of
from penstock.router.policy import Decision
from penstock.router.router import Assignment, Candidate, Router
from penstock.stream.mailbox import Mailbox
from penstock.wire.errors import GenerationFault, PenstockError
from penstock.wire.messages import (
    GENERATION_ID_BYTES,
    Draining,
    Fault,
    Finish,
    PromptReport,
    Role,
    SessionTurn,
    Snapshot,
    Step,
    Submit,
    Terminal,
    TransferReport,
)

if TYPE_CHECKING:
    from penstock.cluster.links.images import ImageAnswer
    from penstock.wire.images import ImageSpan

log = logging.getLogger(__name__)

# Waiting generations that are sent in one go: 2 to 4 ms.
MAX_SENT_AT_ONCE = 64
# How many times in a row a generation may change its worker without a new token: because its workers gave a fault, and because they were
# lost. That may be for another's sake, so it is allowed more often; those that cause it are found as `suspects.py` says.
MAX_FRUITLESS_MIGRATIONS = 3
MAX_FRUITLESS_LOSSES = 8
PREFILL_STALLED = "prefill_stalled"
# The pause before a generation goes back to a worker that just failed it, because there is no other. Doubles each time.
PAUSE_SECONDS = 0.05
# A turn that ended with its first token waits this long for its session to be opened where its next turn goes.
OPENING_SECONDS = 1.0
WATCH_SECONDS = 0.25
# Added to what a prompt should take elsewhere, if it has images: nobody knows how long they wait for a tower. A helper that waits for them
# says that it is alive; one that is silent is given up long before.
IMAGE_SECONDS = 30.0
# A worker with this many prompts to compute, for this long, gets no further generation that has lost its worker.
MIN_UNBEGUN = 8
MAX_WAIT_SECONDS = 0.25
# Assumed for a worker that does not say how many generations it computes at once.
UNKNOWN_BATCH = 4096


class Soon:
    """Something that is done soon, unless it is cancelled."""

    __slots__ = ("do",)

    def __init__(self, do: Callable[[], None]) -> None:
        self.do: Callable[[], None] | None = do

    def cancel(self) -> None:
        self.do = None


class Attempt(Generation):
    """A generation on one worker. `transfer`: this worker pulls its blocks from another one. `is_prefill`: it is there only for its prompt
    and one token."""

    __slots__ = ("assignment", "id", "is_cut", "is_prefill", "is_waiting", "member", "production", "session", "started_at", "transfer")

    def __init__(
        self,
        production: Production,
        member: Member,
        generation_id: bytes,
        assignment: Assignment,
        session: SessionTurn | None,
        transfer: Transfer | None = None,
        *,
        is_prefill: bool = False,
    ) -> None:
        super().__init__(production.mailbox)
        self.transfer = transfer
        self.is_prefill = is_prefill
        self.is_cut = False
        self.production = production
        self.member = member
        self.id = generation_id
        self.assignment = assignment
        self.session = session
        self.started_at = production.mailbox.next_offset
        self.is_waiting = True

    def reported(self, report: PromptReport) -> PromptReport:
        self._begun()
        self.assignment.first_token()
        production, transfer = self.production, self.transfer
        if transfer is not None:
            production.dispatcher.transfers.use(transfer)
        if self.is_prefill:
            production.prompt_cached = report.cached_tokens
            production.turn.prefilled(self.member.name, report)
            return report
        if transfer is not None and transfer.reason == "prefill" and production.prompt_cached is not None:
            # What it got from the one that computed the prompt was not cached before.
            report = structs.replace(report, cached_tokens=min(report.cached_tokens, production.prompt_cached))
        production.turn.reported(self.member.name, self.session, report)
        return report

    def finished(self, finish: Finish) -> None:
        production = self.production
        if self.is_prefill and (finish.reason == "length" or production.has_place_for_session):
            # The length was ours. A session is opened where its next turn goes, though this one has ended.
            self.is_cut = True
            production.finish = finish if finish.reason != "length" else None
            self.end()
        else:
            super().finished(production.finish or finish)

    def ended(self, error: PenstockError | None) -> None:
        self._begun()
        self.release()
        self.production.attempt_ended(self, error)

    def release(self) -> None:
        """It takes nothing of its worker any more."""
        self.assignment.ended()
        if self.transfer is not None:
            self.production.dispatcher.transfers.end(self.transfer)

    def _begun(self) -> None:
        """It has left the worker's queue."""
        if self.is_waiting:
            self.is_waiting = False
            self.production.dispatcher.begun(self.production)

    def cancel(self) -> None:
        """Stops the generation on its worker."""
        self.member.link.cancel(self.id)
        self.release()


@dataclass(slots=True, eq=False)
class Production:
    """One generation, on as many workers as it takes. Its mailbox gets every token once and, unless it is cancelled, one terminal.

    It is in one place at a time: on a worker, in the queue of its model, or in a pause before the next attempt. It has no task: the
    links and the queue call it. `failed` holds the links that failed it since its last token. While one worker computes its prompt for a
    second one, `relay` is its place at the second. If both must work at the same time, `beside` is the attempt that computes the prompt.
    `left_behind` is the attempt on a draining worker that still has its KV.
    """

    dispatcher: Dispatcher
    model: str
    request: Submit
    mailbox: Mailbox
    turn: Turn
    next_id: bytes
    born: int
    died_at: int | None = None
    failed: set[WorkerLink] = field(default_factory=set)
    left_behind: Attempt | None = None
    relay: Relay | None = None
    beside: Attempt | None = None
    prompt_cached: int | None = None
    """The tokens of its prompt that were cached at a worker that computed it for another one."""
    finish: Finish | None = None
    """It has ended with its first token, and its KV goes to the worker of its session. If that fails, it has ended all the same."""
    _attempt: Attempt | None = None
    _opening: asyncio.TimerHandle | None = None
    _pause: asyncio.Handle | Soon | None = None
    _fruitless: int = 0
    _losses: int = 0
    _shares: bool = False

    def __post_init__(self) -> None:
        if self.request.prompt:
            self._share()

    def _share(self) -> None:
        self._shares = True
        self.dispatcher.shared_prompts[self.request.prompt] += 1

    def share_prompt(self) -> None:
        """Gives its prompt a name, so that it travels to a worker once, though two messages have it."""
        if not self.request.prompt:
            self.request = structs.replace(self.request, prompt=self.request.id)
            self._share()

    def try_send(self) -> bool:
        """Sends it if a worker has room for it. Returns whether it was sent; True, too, when it cannot be sent and has failed."""
        try:
            self._attempt = self.dispatcher.try_send(self)
        except PenstockError as error:
            # Such as a request that is too large for a frame. It must not break the link or the queue that called this.
            self.fail(Fault(type(error).__name__, str(error)))
            return True
        except Exception as error:  # an error of ours ends this generation, not the link that called
            log.exception("a generation could not be sent")
            self._break_down(error)
            return True
        return self._attempt is not None

    @property
    def cost(self) -> int:
        attempt = self._attempt
        if attempt is None:
            return 0
        return cost_of(attempt.assignment.share * attempt.member.model.block_size, self.request.max_tokens)

    @property
    def avoids(self) -> tuple[Role, frozenset[WorkerLink]]:
        """The workers that it may not go to. Those that are lost make no difference."""
        return self.wanted_role, frozenset([link for link in self.failed if link.is_usable])

    @property
    def links(self) -> list[WorkerLink]:
        """Where it runs; if two work at the same time, both."""
        return [attempt.member.link for attempt in (self.beside, self._attempt) if attempt is not None]

    @property
    def age(self) -> int:
        """How many tokens it has made where it runs."""
        return 0 if self._attempt is None else self.mailbox.next_offset - self._attempt.started_at

    @property
    def wanted_role(self) -> Role:
        """What a worker must be good at. A generation of one token has nothing to decode; with a session, its worker matters more."""
        is_short = self.request.max_tokens <= self.request.offset + 1 and self.turn.session is None
        return "prefill" if is_short else "decode"

    @property
    def may_be_relayed(self) -> bool:
        """Whether another worker may compute its prompt, and make a token. Tried once: afterwards its worker computes what is missing."""
        return self.request.max_tokens > 1 and not (self.failed or self.mailbox.history or self.request.offset)

    @property
    def has_place_for_session(self) -> bool:
        return self.relay is not None and self.relay.session is not None and self.relay.is_alive

    def cancel(self) -> None:
        """Stops it, wherever it is. Does nothing when it has ended."""
        self._release()
        attempt, pause = self._attempt, self._pause
        self._attempt = self._pause = None
        if attempt is not None:
            attempt.cancel()
        elif pause is not None:
            pause.cancel()
            self.dispatcher.suspects.discard(self)
        else:
            self.dispatcher.forget(self)

    def fail(self, fault: Fault) -> None:
        """Ends it with this fault."""
        self._end(fault)

    def _end(self, terminal: Terminal) -> None:
        self._release()
        self.dispatcher.suspects.discard(self)
        self.mailbox.end(terminal)

    def _release(self) -> None:
        """It has ended: it needs its prompt, its other place and its KV no more."""
        if self._shares:
            self._shares = False
            self.dispatcher.release_prompt(self.request.prompt)
        if self._opening is not None:
            self._opening.cancel()
        self._drop_relay("cancelled")
        self.forget_left_behind()

    def _drop_relay(self, ending: Ending) -> None:
        relay, beside = self.relay, self.beside
        self.relay = self.beside = None
        if relay is not None:
            relay.drop(ending)
        if beside is not None:
            beside.cancel()

    def forget_left_behind(self) -> None:
        """Nobody pulls its KV from the worker that drains."""
        attempt, self.left_behind = self.left_behind, None
        if attempt is not None:
            attempt.member.link.end_transfers([attempt.id])

    def attempt_ended(self, attempt: Attempt, error: PenstockError | None) -> None:
        """Called by an attempt. Without an error the mailbox has its terminal."""
        if isinstance(error, GenerationFault) and error.fault.code == "draining" and attempt.member.model.kv_fingerprint:
            self._leave_behind(attempt)
        if attempt is self.beside:
            if error is None or self.age:
                self.beside = None
                if self._attempt is not None and self._attempt.transfer is not None:
                    self.dispatcher.transfers.was_computed(self._attempt.transfer)
                return
            # The other half cannot go on alone.
            self._give_up("lost")
        elif attempt is not self._attempt:
            return  # cancelled
        self._attempt = None
        if attempt.is_cut:
            self._go_on_soon(self._hand_on)
        elif error is None:
            self._release()
        elif self.finish is not None:
            self._end(self.finish)
        elif isinstance(error, GenerationFault) and not error.fault.retryable:
            self.fail(error.fault)
        else:
            self._drop_relay("lost")
            self._go_on_soon(partial(self._continue, attempt, error))

    def next_request(self) -> Submit:
        """The request from the next offset on, with the tokens so far added to its prompt."""
        request, history = self.request, self.mailbox.history
        if self.finish is not None:
            request = structs.replace(request, max_tokens=request.offset + len(history), min_tokens=0, grammar=None)
        if not history:
            return request if self.next_id == request.id else structs.replace(request, id=self.next_id)
        return structs.replace(
            request,
            id=self.next_id,
            token_ids=(*request.token_ids, *history),
            offset=request.offset + len(history),
            prompt_logprobs=False,
        )

    def _go_on_soon(self, step: Callable[[], None]) -> None:
        """Not now: a link is in the middle of a frame, or of its own end, and there may be a thousand others."""
        self._pause = self.dispatcher.soon(partial(self._guarded, step))

    def _guarded(self, step: Callable[[], None]) -> None:
        """Takes a step that the event loop called. An error of ours still ends the generation, so its reader does not wait for ever."""
        self._pause = None
        try:
            step()
        except Exception as error:
            self._break_down(error)
            raise

    def _break_down(self, error: Exception) -> None:
        """Ends it after an error of ours."""
        self.fail(Fault("internal_error", f"{type(error).__name__} while generating"))

    def _hand_on(self) -> None:
        """Its prompt is computed and its first token made. It continues where it has its place, or anywhere."""
        self.next_id = secrets.token_bytes(GENERATION_ID_BYTES)
        relay, self.relay = self.relay, None
        if relay is not None and relay.is_alive:
            try:
                self._attempt = self.dispatcher.send_on(self, relay)
                if self.finish is not None:
                    self._opening = asyncio.get_running_loop().call_later(OPENING_SECONDS, self._guarded, self._leave_unopened)
            except PenstockError as error:
                self._end(self.finish or Fault(type(error).__name__, str(error)))
            return
        if relay is not None:
            relay.drop("lost")
        if self.finish is None:
            self.send_again()
        else:
            self._end(self.finish)

    def _leave_unopened(self) -> None:
        """Its client has all tokens, and does not wait any longer for its session."""
        assert self.finish is not None
        self._give_up("cancelled")
        self._end(self.finish)

    def can_give_up(self, transfer: Transfer) -> bool:
        """If two engines must work at the same time, only another one can compute its prompt. Without one, it waits: its engine may only be
        in a long step, and if it hangs, the pool ends its link."""
        needs_another = transfer.waits and transfer.source.model.kv_handover == "meeting"
        return not needs_another or self.dispatcher.has_another(self, transfer.source)

    def transfer_was_late(self) -> None:
        """If its prompt is still being computed elsewhere, that is given up: its own worker computes, or other ones."""
        attempt = self.beside or self._attempt
        if attempt is None or not attempt.is_prefill or self.age:
            return
        self._give_up("stalled")
        fault = Fault(PREFILL_STALLED, f"worker {attempt.member.name} took too long to compute the prompt for another", retryable=True)
        self._guarded(partial(self._continue, attempt, GenerationFault(fault)))

    def _give_up(self, ending: Ending) -> None:
        """It leaves the workers where it is."""
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        if attempt.transfer is not None:
            self.dispatcher.transfers.end(attempt.transfer, ending)
        attempt.abandon()
        attempt.cancel()
        self._drop_relay(ending)

    def _continue(self, attempt: Attempt, error: PenstockError) -> None:
        """On another worker, after this attempt failed; after a pause when there is no other."""
        link, age = attempt.member.link, self.mailbox.next_offset - attempt.started_at
        if age:
            self._fruitless = self._losses = 0
            self.failed.clear()
        self.failed.add(link)
        if isinstance(error, GenerationFault):
            fault, has_died = error.fault, False
            # A worker that is only late does not refuse it, and each one is given up once.
            self._fruitless += not age and fault.code != PREFILL_STALLED
        else:
            fault = Fault("worker_lost", f"worker {attempt.member.name} was lost during the generation: {error}", retryable=True)
            has_died = link.has_died
            self._losses += not age
        if self._fruitless > MAX_FRUITLESS_MIGRATIONS and self.dispatcher.may_get_another(self):
            # Until that one speaks or is given up, it is tried where it failed, after the longest pause.
            self._fruitless = MAX_FRUITLESS_MIGRATIONS
        if self._fruitless > MAX_FRUITLESS_MIGRATIONS or self._losses > MAX_FRUITLESS_LOSSES:
            message = f"{self._fruitless + self._losses} attempts in a row failed without a token; the last one: {fault.message}"
            self.fail(Fault(fault.code, message))
            return
        self.dispatcher.migrations[fault.code] += 1
        self.next_id = secrets.token_bytes(GENERATION_ID_BYTES)
        if has_died and self.dispatcher.suspects.examine(self, link, age):
            return
        fruitless = self._fruitless + self._losses
        if fruitless and self.dispatcher.has_only_failed(self):
            # Only workers that just failed it are left. They may need a moment.
            seconds = PAUSE_SECONDS * 2**fruitless
            self._pause = asyncio.get_running_loop().call_later(seconds, self._guarded, self.send_again)
        else:
            self.send_again()

    def _leave_behind(self, attempt: Attempt) -> None:
        """A worker that drains offers the KV of what it hands over, under the generation's id, until it is told that nobody needs it."""
        if attempt is self._attempt:
            self.forget_left_behind()
            self.left_behind = attempt
        else:
            # It was cancelled, or only helped.
            attempt.member.link.end_transfers([attempt.id])

    def hold(self, seconds: float) -> None:
        """Pauses it, and has it judged after that time, unless `end_hold` comes first."""
        self._pause = asyncio.get_running_loop().call_later(seconds, self._guarded, partial(self.dispatcher.suspects.judge, self))

    def end_hold(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None

    def stop(self) -> None:
        """Ends it: it kills its workers."""
        self.dispatcher.suspects.stopped += 1
        message = f"{len(self.turn.deaths)} workers died while they ran this request, the last one in a trial of it (--trial-seconds)"
        log.error("%s: it is stopped", message)
        self.fail(Fault("kills_workers", f"{message}: it is not tried again"))

    def send_soon(self) -> None:
        self._go_on_soon(self.send_again)

    def send_again(self) -> None:
        if not self.try_send():
            self.dispatcher.enqueue(self, is_new=False)


class Dispatcher:
    """Runs generations on the workers of a pool, while it is entered as a context. One call of `produce` is one generation.

    Delivery: a generation whose worker is lost, stalls, drains or gives a retryable fault continues on another worker from the next
    offset, so no token is lost or repeated. There is no limit as long as every worker adds tokens. Without a new token, it continues at
    most MAX_FRUITLESS_MIGRATIONS times in a row, or MAX_FRUITLESS_LOSSES if workers are lost. A request that kills its workers is stopped
    after the second: see `suspects.py`. A generation waits in a queue while no worker has room, and at most `worker_wait` seconds while
    its model has no worker at all.
    """

    def __init__(self, pool: WorkerPool, router: Router, limits: DispatchLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._router = router
        self._limits = limits
        self._clock = clock
        self._queues: dict[str, WaitingQueue] = {}
        # When a model with waiting generations lost its last worker.
        self._deserted: dict[str, float] = {}
        self._watch: asyncio.Task[None] | None = None
        self._soon: deque[Soon] = deque()
        self.migrations: Counter[str] = Counter()
        self.transfers = Transfers(clock)
        router.avoids = self.transfers.avoids
        self.on_draining: Callable[[Member], None] = lambda _: None
        """Called when a worker takes no more work."""
        self.answer_image: Callable[[Member, Submit, ImageSpan, str], Coroutine[Any, Any, ImageAnswer]] | None = None
        """Decides how a worker gets an image: see `links.images.AnswerImage`. Set it before workers join. So the next."""
        self.on_image_transfers: Callable[[Member, Sequence[TransferReport]], None] = lambda _, __: None
        """Called with what workers report about transfers. Some may be of images."""
        self.suspects = Suspects(lambda model: [member.link for member in pool.usable(model)], limits.trial_seconds, self.soon, clock)
        # By model and lane: how many wait at workers, and who waits here with none there.
        self._unbegun: Counter[tuple[str, str]] = Counter()
        self._hungry: dict[str, set[str]] = {}
        self.shared_prompts: Counter[bytes] = Counter()
        """How many generations that have not ended share each prompt."""
        pool.listeners.append(self)

    @property
    def queued(self) -> int:
        """Generations that wait until a worker has room."""
        return (len(self.suspects) if self.suspects.deaths else 0) + sum(len(queue) for queue in self._queues.values())

    def waiting_of(self, lane: str) -> int:
        """Generations of one tenant that wait for their first worker."""
        return sum(queue.count(lane) for queue in self._queues.values())

    async def __aenter__(self) -> Self:
        self._watch = asyncio.create_task(self._watch_deserted(), name="wait for workers")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watch is not None
        self._watch.cancel()
        await asyncio.wait([self._watch])

    def produce(self, model: str, turn: Turn, request: Submit, mailbox: Mailbox) -> Production:
        """Starts a generation: sends it at once if a worker has room, else it waits in the queue.

        Its deltas and its terminal go to the mailbox. Raises GenerationFault when the queue is full.
        """
        production = Production(self, model, request, mailbox, turn, request.id, self.suspects.deaths)
        if not (self._is_next(production) and production.try_send()):
            if not may_wait(self._queues.values(), request, self._limits.max_queued, self.queued):
                message = f"the queue is full: at most {self._limits.max_queued:,} generations wait for a worker (--max-queued)"
                if self.queued < self._limits.max_queued:
                    message += ". The free places are for keys below their share"
                production.cancel()
                raise GenerationFault(Fault("queue_full", message))
            self.enqueue(production, is_new=True)
        return production

    def _is_next(self, production: Production) -> bool:
        """Whether nobody waits that goes before this new one. Those that lost their worker do, unless they have no place to go now."""
        queue = self._queue(production.model)
        if self._may_overdraw(production) and not queue.count(production.request.lane):
            return True
        return not queue.has_new and not (queue.has_lost and queue.send(MAX_SENT_AT_ONCE))

    def soon(self, do: Callable[[], None]) -> Soon:
        """Does this after all that was to be done before, a few in each turn of the event loop: a worker may have had a thousand
        generations."""
        if not self._soon:
            asyncio.get_running_loop().call_soon(self._do_some)
        self._soon.append(Soon(do))
        return self._soon[-1]

    def _do_some(self) -> None:
        try:
            for _ in range(min(len(self._soon), MAX_SENT_AT_ONCE)):
                try:
                    if (do := self._soon[0].do) is not None:
                        do()
                finally:
                    self._soon.popleft()
        finally:
            if self._soon:
                asyncio.get_running_loop().call_soon(self._do_some)

    def enqueue(self, production: Production, *, is_new: bool) -> None:
        """It waits until a worker has room."""
        self._queue(production.model).add(production, production.request, is_new=is_new)
        if self._may_overdraw(production):
            self._hungry.setdefault(production.model, set()).add(production.request.lane)

    def begun(self, production: Production) -> None:
        """It waits at a worker no more."""
        key = model, lane = production.model, production.request.lane
        self._unbegun[key] -= 1
        if not self._unbegun[key]:
            del self._unbegun[key]
            if lane:
                self._hungry.setdefault(model, set()).add(lane)

    def _may_overdraw(self, production: Production) -> bool:
        """Whether it may go to a worker without room: none of its tenant waits at a worker. So workers know every tenant that waits."""
        return bool(production.request.lane) and (production.model, production.request.lane) not in self._unbegun

    def _queue(self, model: str) -> WaitingQueue:
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = WaitingQueue(self._clock)
        return queue

    def forget(self, production: Production) -> None:
        """It does not wait any more."""
        if self.suspects.deaths:
            self.suspects.discard(production)
        queue = self._queues.get(production.model)
        if queue is not None:
            queue.discard(production)

    def release_prompt(self, name: bytes) -> None:
        """One generation fewer shares this prompt. After the last one all workers drop it."""
        self.shared_prompts[name] -= 1
        if not self.shared_prompts[name]:
            del self.shared_prompts[name]
            for member in self._pool.members:
                member.link.drop_prompt(name)

    def may_get_another(self, production: Production) -> bool:
        """Whether a worker that has not just failed it is silent. Soon it speaks, or is given up."""
        return any(member.is_quiet and member.link not in production.failed for member in self._pool.usable(production.model))

    def has_only_failed(self, production: Production) -> bool:
        """Whether there are workers for it, and all of them have just failed it, or cannot run it without one that has."""
        return bool(self._pool.usable(production.model)) and not self.has_another(production)

    def has_another(self, production: Production, besides: Member | None = None) -> bool:
        """Whether workers that have not just failed it can run it, without this one."""
        others = [member for member in self._others(production) if member is not besides]
        return bool(self._complete(others, self._helpers(production, others)))

    # Called by the pool and by its links.

    def joined(self, member: Member) -> None:
        member.link.on_report = partial(self._reported, member)
        member.link.on_transfers = partial(self._transferred, member)
        if self.answer_image is not None:
            member.link.answer_image = partial(self.answer_image, member)
        if member.is_encoder:
            return
        if self._router.join(member.name, member.model):
            member.link.request_snapshot()
        if self.suspects.deaths:
            self.suspects.pump()
        self.pump(member.model.name)

    def _transferred(self, member: Member, reports: Sequence[TransferReport]) -> None:
        self.transfers.reported(member, reports)
        self.on_image_transfers(member, reports)

    def left(self, member: Member) -> None:
        self._router.leave(member.name)
        self._leave_more()
        owners = self.transfers.left(member)
        if member.is_encoder:
            return
        if member.link.has_died:
            death = self.suspects.record(member.link)
            for owner in owners:
                # It was there, too, though its generation was not.
                owner.turn.deaths |= {death.number}
        else:
            self.suspects.left(member.link)

    def _reported(self, member: Member, report: WorkerReport) -> None:
        match report:
            case Step():
                self._stepped(member, report)
            case Snapshot():
                self._router.load_snapshot(member.name, report)
                self._load_more(member.name)
            case Draining():
                log.info("worker %s is draining and gets no new generations", member.name)
                self.on_draining(member)

    def _leave_more(self) -> None:
        if self._router.leave_more():
            asyncio.get_running_loop().call_soon(self._leave_more)

    def _load_more(self, worker: str) -> None:
        """Goes on with a snapshot, while others go on meanwhile."""
        if self._router.load_more(worker):
            asyncio.get_running_loop().call_soon(self._load_more, worker)

    def _stepped(self, member: Member, step: Step) -> None:
        self._router.report(member.name, step.stats)
        if step.events is not None and self._router.receive(member.name, step.events):
            log.info("KV events of %s were missed: asking for a snapshot", member.name)
            member.link.request_snapshot()
        if self.suspects.deaths:
            self.suspects.heard(member.link)
        self.pump(member.model.name)

    def pump(self, model: str) -> None:
        """Sends waiting generations if a worker has room now. If there are many, others go on meanwhile."""
        queue, hungry = self._queues.get(model), self._hungry.pop(model, None)
        if not queue:
            return
        if queue.send(MAX_SENT_AT_ONCE):
            asyncio.get_running_loop().call_soon(self.pump, model)
        left = {lane for lane in hungry or () if (model, lane) not in self._unbegun and not queue.send_first_of(lane)}
        if left:
            self._hungry[model] = left

    def _others(self, production: Production) -> list[Member]:
        """The workers that have not just failed it, without silent ones: nobody knows how long it would wait for those. A worker that was
        connected again counts as another."""
        usable = self._pool.usable(production.model)
        return [member for member in usable if member.link not in production.failed and not member.is_quiet]

    def try_send(self, production: Production) -> Attempt | None:
        """Sends it to the worker that the router chooses; None when no worker has room. Workers that failed it are the last resort.

        Waiting generations try again with every frame that a worker sends.
        """
        members = self._pool.usable(production.model)
        if production.failed:
            # It lost a worker before. Do not spend an attempt on one that may be dead, too.
            members = self._pool.speaking(self._others(production) or members)
        members = self._without_trials(production, members)
        helpers = self._helpers(production, members)
        complete = self._complete(members, helpers)
        if not complete and members and production.failed:
            # One half of a pair failed it: the same pair is the last resort.
            members = self._without_trials(production, self._pool.speaking(self._pool.usable(production.model)))
            helpers = self._helpers(production, members)
            complete = self._complete(members, helpers)
        members = self._with_role(complete, production)
        usable = {member.name: member for member in members}
        rooms = {name: self._has_room(member) for name, member in usable.items()}
        if not any(rooms.values()) and self._may_overdraw(production):
            rooms = {name: not member.is_quiet and member.model.kv_handover == "blocks" for name, member in usable.items()}
        if not any(rooms.values()):
            return None
        candidates = [Candidate(name, rooms[name], member.is_quiet) for name, member in usable.items()]
        turn = production.turn
        preferred, why = turn.preference
        block_size = next(iter(usable.values())).model.block_size
        blocks = -(-len(production.request.token_ids) // block_size)
        names = partial(turn.block_names, production.request.token_ids, block_size, production.request.root)
        decision = self._router.choose(candidates, names, blocks, preferred, why, turn.hints.router, helpers)
        if decision is None:
            return None
        member, move = usable[decision.worker], decision.move
        source = None if move is None else self._pool.find(move.worker)
        if move is not None and move.reason == "prefill" and source is not None:
            return self._send_relayed(production, member, source, decision, blocks)
        return self._send(production, member, decision, blocks)

    def _waits_for_trial(self, production: Production) -> bool:
        return self.suspects.deaths > 0 and production in self.suspects

    def _without_trials(self, production: Production, members: list[Member]) -> list[Member]:
        """Those of these workers where nobody is on trial, if it waits for its own trial."""
        return [member for member in members if self.suspects.is_free(member.link)] if self._waits_for_trial(production) else members

    def _helpers(self, production: Production, members: list[Member]) -> list[str]:
        """Those of these workers that could compute its prompt for another one."""
        able = [member for member in members if "prefill" in member.model.roles and self._has_room(member)]
        if able and (not production.may_be_relayed or self._waits_for_trial(production)):
            able = [member for member in able if member.model.kv_handover == "meeting"]
        return [member.name for member in able if member.model.kv_handover != "ticket" or not production.request.prompt_logprobs]

    def _complete(self, members: list[Member], helpers: list[str]) -> list[Member]:
        """Those that can run a generation: themselves, or with one of these helpers."""
        found = [helper for name in helpers if (helper := self._pool.find(name)) is not None]
        return [member for member in members if member.model.kv_handover != "meeting" or any(map(member.can_meet, found))]

    def _send(self, production: Production, member: Member, decision: Decision, blocks: int) -> Attempt:
        request = production.next_request()
        session = production.turn.sent(production.mailbox.index, decision)
        transfer = self._begin_pull(production, member, decision)
        if session is not None or transfer is not None:
            request = structs.replace(request, session=session, source=None if transfer is None else transfer.message)
        assignment = self._router.sent(decision, decision.names, blocks)
        attempt = Attempt(production, member, request.id, assignment, session, transfer)
        self._submit(attempt, request)
        return attempt

    def _submit(self, attempt: Attempt, request: Submit) -> None:
        if self._waits_for_trial(attempt.production):
            attempt.member.link.ping()
        try:
            attempt.member.link.submit(request, attempt)
        except PenstockError:
            attempt.release()
            raise
        production = attempt.production
        self._unbegun[production.model, production.request.lane] += 1

    def _begin_pull(self, production: Production, member: Member, decision: Decision) -> Transfer | None:
        """The transfer of blocks that the worker lacks and another one has, if that is cheaper than computing them."""
        if production.left_behind is not None and (inherited := self._inherit(production, member, decision)) is not None:
            return inherited
        move = decision.move
        source = None if move is None else self._pool.find(move.worker)
        if move is None or source is None or source.is_quiet or source.link in production.failed or move.reason == "prefill":
            return None
        return self.transfers.begin(production, source, member, move.reason, move.seconds, blocks=move.overlap)

    def _inherit(self, production: Production, member: Member, decision: Decision) -> Transfer | None:
        """The transfer from the worker that drains and has computed this generation's blocks: all of them if it has made a token."""
        left_behind, there = production.left_behind, None
        assert left_behind is not None
        if production.mailbox.next_offset > left_behind.started_at:
            there = (len(production.request.token_ids) + production.mailbox.next_offset - 1) // member.model.block_size
        move = self._router.inherit(decision, left_behind.member.name, there)
        if move is None or left_behind.member.link.lost.done():
            production.forget_left_behind()
            return None
        production.left_behind = None
        return self.transfers.begin(production, left_behind.member, member, "drain", move.seconds, left_behind.id, move.overlap)

    def _send_relayed(self, production: Production, member: Member, helper: Member, decision: Decision, blocks: int) -> Attempt:
        """One worker computes the prompt and makes the first token. The other one pulls the blocks meanwhile, and continues."""
        assert decision.move is not None
        production.forget_left_behind()
        production.share_prompt()
        session = production.turn.sent(production.mailbox.index, decision)
        seconds = decision.move.seconds + IMAGE_SECONDS * bool(production.request.images)
        transfer = self.transfers.begin(production, helper, member, "prefill", seconds)
        transfer.pull_seconds = decision.move.pull_seconds
        relay = Relay(self.transfers, transfer, member, self._router.sent(decision, (), blocks), session)
        production.relay = relay
        request = first_leg(production.next_request(), transfer)
        there = structs.replace(decision, worker=helper.name, overlap=decision.move.overlap)
        attempt = Attempt(production, helper, request.id, self._router.sent(there, decision.names, blocks), None, is_prefill=True)
        handover = helper.model.kv_handover
        if handover != "blocks":
            # The other one makes all tokens.
            attempt.abandon()
        self._submit(attempt, request)
        if handover == "meeting":
            production.relay, production.beside = None, attempt
            production.next_id = secrets.token_bytes(GENERATION_ID_BYTES)
            return self.send_on(production, relay)
        try:
            relay.fetch(request)
        except PenstockError:
            # The other worker will compute what it lacks.
            self.transfers.end(transfer, "lost")
        return attempt

    def send_on(self, production: Production, relay: Relay) -> Attempt:
        """Sends it to the worker where it has its place, which has its KV or is pulling it."""
        source = relay.take()
        request = structs.replace(production.next_request(), session=relay.session, source=source)
        transfer = None if source is None else relay.transfer
        attempt = Attempt(production, relay.member, request.id, relay.assignment, relay.session, transfer)
        self._submit(attempt, request)
        return attempt

    def _with_role(self, members: list[Member], production: Production) -> list[Member]:
        """Those that are meant for it and answer. Without one, all of them: each can do everything.

        A generation that has lost its worker is one of many. They are sent as the workers get on, so that workers of all roles take their
        part, and the next loss does not hit all of them. Until they are sent, no other one keeps the workers busy.
        """
        if production.failed or self._queue(production.model).has_lost:
            members = [member for member in members if not self._is_swamped(member)]
        return [member for member in members if member.is_for(production.wanted_role) and not member.is_quiet] or members

    def _is_swamped(self, member: Member) -> bool:
        return member.link.unbegun >= MIN_UNBEGUN and self._router.waiting_seconds(member.name) > MAX_WAIT_SECONDS

    def _has_room(self, member: Member) -> bool:
        """A quiet worker has no room: it would not begin before it speaks again. Nothing waits at engines of others that hand KV over:
        it is there for a short time only, and another engine may be waiting for this one."""
        link, batch = member.link, member.model.max_batch or UNKNOWN_BATCH
        if member.model.kv_handover == "blocks":
            batch += self._limits.worker_queue
        return link.unbegun < self._limits.worker_queue and link.active + link.reserved < batch and not member.is_quiet

    async def _watch_deserted(self) -> None:
        """Ends the wait for workers that do not come."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = self._clock()
            self.transfers.tick()
            self.suspects.tick()
            for model in {*self._queues, *self.suspects.models}:
                # A worker may have become silent since the last frame of any other.
                self.pump(model)
                queue = self._queue(model)
                usable = self._pool.usable(model)
                able = [member.name for member in usable if "prefill" in member.model.roles]
                if not (len(queue) or model in self.suspects.models) or self._complete(usable, able):
                    self._deserted.pop(model, None)
                    continue
                since = self._deserted.setdefault(model, now)
                if now - since >= self._limits.worker_wait:
                    missing = "prefill and decode worker" if usable else "worker"
                    message = f"no {missing} for model {model!r} came within {self._limits.worker_wait:g} s"
                    queue.fail(now - self._limits.worker_wait, Fault("no_worker", message))
                    self.suspects.fail(model, now - self._limits.worker_wait, Fault("no_worker", message))
