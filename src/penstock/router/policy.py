"""The choice of a worker: a pure function of what is known at that moment; and the hints that a client gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from penstock.config.front_end import Policy, RouterSettings
from penstock.router.moving import Move
from penstock.wire.messages import DEFAULT_SESSION_SECONDS, SessionAction

Preference = Literal["session", "affinity", "parent"]
Reason = Literal["only", "session", "affinity", "parent", "prefix", "least_loaded", "round_robin", "random", "sampled"]
Diversion = Literal["gone", "quiet", "overloaded"]
# A worker leads too far only if it also has this many times the generations of the worker with the fewest.
LEAD_FACTOR = 1.5


class SessionWish(Struct, frozen=True, gc=False):
    """The session that a client wants its request to be a turn of. `parent` is the session that this one was split from. `is_final`: its
    last turn, opened or not: it is closed afterwards."""

    id: str
    action: SessionAction = "open"
    timeout: float = DEFAULT_SESSION_SECONDS
    parent: str | None = None
    is_final: bool = False


class PlacedMark(Struct, frozen=True, gc=False):
    """Keep the prompt for `seconds`: all of it, or up to a place: behind the first `characters` of the content of a message."""

    seconds: float
    message: int | None = None
    characters: int = 0


class Hints(Struct, frozen=True, gc=False):
    """What a client asks for besides the answer.

    `affinity` is a key: the request goes where requests with this key went before. It holds no lease, and a session takes precedence.
    For `retention_seconds` prompt and answer are kept; `marks` are for parts of the prompt.
    `router` replaces the server's policy for this request. `wants_route`: the answer tells how its worker was chosen. Requests share KV
    only if they have the same `cache_salt`, or none.
    """

    session: SessionWish | None = None
    affinity: str | None = None
    retention_seconds: float = 0.0
    priority: int = 0
    router: Policy | None = None
    wants_route: bool = False
    cache_salt: str | None = None
    marks: tuple[PlacedMark, ...] = ()

    @property
    def longest_retention(self) -> float:
        return max([self.retention_seconds, *(mark.seconds for mark in self.marks)])


class WorkerView(Struct, frozen=True, gc=False):
    """One worker at the moment of the choice.

    `overlap` counts the leading blocks of the prompt that it has. `load` is in blocks, `active` in generations. `is_quiet`: it owes
    tokens and has been silent for a while.
    """

    name: str
    overlap: int = 0
    load: float = 0.0
    active: int = 0
    has_room: bool = True
    is_quiet: bool = False


class RouteRequest(Struct, frozen=True):
    """What is to be placed: the number of prompt blocks, the preferred worker and why, and a policy that replaces the settings' one."""

    blocks: int = 0
    preferred: str | None = None
    preferred_reason: Preference = "session"
    policy: Policy | None = None


class Decision(Struct, frozen=True):
    """The worker, and why.

    `diverted` says why the preferred worker was not taken; `reason` then belongs to the choice that was made instead. `costs` has the
    workers that were compared. `names` are the prompt's block names, if the router needed them. `move`: blocks of the prompt come from
    another worker.
    """

    worker: str
    reason: Reason
    diverted: Diversion | None = None
    overlap: int = 0
    cost: float = 0.0
    costs: tuple[tuple[str, float], ...] = ()
    names: Sequence[bytes] = ()
    move: Move | None = None


def choose(view: Sequence[WorkerView], request: RouteRequest, settings: RouterSettings, turn: int, draw: float) -> Decision | None:
    """The worker for a request; None without any worker.

    A quiet worker is used only when all are quiet; a full one only when all the rest are full. The preferred worker is taken unless it
    is gone, not usable or overloaded. Else the policy decides. Among equal workers the one with the fewest generations wins; if these
    are equal, too, workers take turns: `turn` counts up. `draw` is a random number from 0 to below 1.
    """
    if not view:
        return None
    if len(view) == 1 and request.preferred is None:
        (worker,) = view
        cost = _cost(worker, request, settings)
        return Decision(worker.name, "only", None, worker.overlap, cost, ((worker.name, cost),))
    usable = _usable(view)
    preferred, diverted = None, None
    if request.preferred is not None:
        preferred = next((worker for worker in view if worker.name == request.preferred), None)
        diverted = _diversion(preferred, usable, request, settings)
    if preferred is not None and diverted is None:
        cost = _cost(preferred, request, settings)
        return Decision(preferred.name, request.preferred_reason, None, preferred.overlap, cost, ((preferred.name, cost),))
    policy, is_only = request.policy or settings.policy, len(usable) == 1
    if policy == "kv":
        usable = _within_lead(usable, settings)
    costs = [_cost(worker, request, settings) for worker in usable]
    position, reason = _pick(usable, costs, policy, settings.temperature, turn, draw)
    chosen = usable[position]
    listed = tuple([(worker.name, cost) for worker, cost in zip(usable, costs, strict=True)])
    return Decision(chosen.name, "only" if is_only else reason, diverted, chosen.overlap, costs[position], listed)


def _usable(view: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Workers that answer and have room; if there are none, those that answer; if there are none, all."""
    answering = [worker for worker in view if not worker.is_quiet] or view
    return [worker for worker in answering if worker.has_room] or answering


def _within_lead(usable: Sequence[WorkerView], settings: RouterSettings) -> Sequence[WorkerView]:
    """Without the workers that lead the one with the fewest generations by too many."""
    fewest = min([worker.active for worker in usable])
    limit = max(fewest + settings.max_lead, fewest * LEAD_FACTOR)
    return [worker for worker in usable if worker.active <= limit]


def _diversion(
    preferred: WorkerView | None, usable: Sequence[WorkerView], request: RouteRequest, settings: RouterSettings
) -> Diversion | None:
    if preferred is None:
        return "gone"
    if preferred not in usable:
        return "quiet" if preferred.is_quiet else "overloaded"
    least = min(worker.load for worker in usable)
    above = preferred.load - least > settings.overload_blocks
    return "overloaded" if above and preferred.load > settings.overload_factor * (least + request.blocks) else None


def _cost(worker: WorkerView, request: RouteRequest, settings: RouterSettings) -> float:
    return settings.overlap_weight * (request.blocks - worker.overlap) + settings.load_weight * worker.load


def _pick(
    usable: Sequence[WorkerView], costs: Sequence[float], policy: Policy, temperature: float, turn: int, draw: float
) -> tuple[int, Reason]:
    count = len(usable)
    match policy:
        case "round-robin":
            return turn % count, "round_robin"
        case "random":
            return min(int(draw * count), count - 1), "random"
        case "least-loaded":
            return _lowest(usable, [worker.load for worker in usable], turn), "least_loaded"
        case "kv" if temperature > 0:
            return _sample(costs, temperature, draw), "sampled"
        case "kv":
            position = _lowest(usable, costs, turn)
            return position, "prefix" if usable[position].overlap else "least_loaded"


def _lowest(usable: Sequence[WorkerView], costs: Sequence[float], turn: int) -> int:
    lowest, count = min(costs), len(costs)
    equals = [position for position in range(count) if costs[position] == lowest]
    if len(equals) == 1:
        return equals[0]
    return min(equals, key=lambda position: (usable[position].active, (position - turn) % count))


def _sample(costs: Sequence[float], temperature: float, draw: float) -> int:
    """Softmax of the costs, scaled to a range of 1, so that a temperature means the same for cheap and expensive requests."""
    lowest = min(costs)
    scale = (max(costs) - lowest) * temperature
    weights = [math.exp((lowest - cost) / scale) if scale else 1.0 for cost in costs]
    left = draw * sum(weights)
    for position, weight in enumerate(weights):
        left -= weight
        if left < 0:
            return position
    return len(weights) - 1
