"""How busy a worker is, in KV blocks, as one front end sees it."""

from __future__ import annotations

from penstock.wire.messages import WorkerStats


class WorkerLoad:
    """The load of one worker: blocks still to prefill plus blocks held.

    Generations of this front end count at once. `beyond` is what the worker's last report has more than that: work of other front
    ends, and blocks generated since. A generation counts with its share: its prompt minus the overlap.
    """

    __slots__ = ("active", "beyond", "beyond_active", "held", "prefilling", "to_prefill")

    def __init__(self) -> None:
        self.active = 0
        self.prefilling = 0
        self.to_prefill = 0
        self.held = 0
        self.beyond = 0.0
        self.beyond_active = 0

    @property
    def blocks(self) -> float:
        return self.to_prefill + self.held + self.beyond

    @property
    def generations(self) -> int:
        return self.active + self.beyond_active

    def report(self, stats: WorkerStats) -> None:
        """Takes the worker's own figures. A queued generation of others counts as much as an average running one."""
        queued = max(0, stats.queued - self.prefilling)
        average = stats.kv_blocks_used / stats.running if stats.running else 0.0
        self.beyond = max(0, stats.kv_blocks_used - self.held) + queued * average
        self.beyond_active = max(0, stats.running + stats.queued - self.active)

    def begin(self, share: int) -> Assignment:
        """A generation was sent there; `share` is the number of blocks that it adds."""
        self.active += 1
        self.prefilling += 1
        self.to_prefill += share
        self.held += share
        return Assignment(self, share)

    def check_integrity(self) -> None:
        """Raises AssertionError when the counts contradict each other."""
        assert 0 <= self.prefilling <= self.active, (self.prefilling, self.active)
        assert 0 <= self.to_prefill <= self.held, (self.to_prefill, self.held)
        assert self.active or not self.held, self.held
        assert min(self.beyond, self.beyond_active) >= 0, (self.beyond, self.beyond_active)


class Assignment:
    """One generation's share of a worker's load. Both methods may be called again and in any order: only the first call counts."""

    __slots__ = ("_has_ended", "_is_prefilling", "_load", "_share")

    def __init__(self, load: WorkerLoad, share: int) -> None:
        self._load = load
        self._share = share
        self._is_prefilling = True
        self._has_ended = False

    def first_token(self) -> None:
        """The prompt is computed."""
        if self._is_prefilling:
            self._is_prefilling = False
            self._load.prefilling -= 1
            self._load.to_prefill -= self._share

    def ended(self) -> None:
        """The generation holds no blocks any more."""
        if self._has_ended:
            return
        self._has_ended = True
        self.first_token()
        load = self._load
        load.active -= 1
        load.held -= self._share
        if not load.active and not load.beyond_active:
            # An idle worker sends no reports, so the last figure would stay.
            load.beyond = 0.0
