"""The front end's metrics, and its workers' as they report them.

What the token path counts are plain integers; they become metrics when somebody asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.wire.messages import WorkerStats

Samples = dict[tuple[str, ...], float]
"""Values by their labels."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Tally:
    """What the front end counts on the token path."""

    running: int = 0
    queued: int = 0
    tokens_delivered: int = 0
    writes: int = 0
    late_puts: int = 0
    clients_left: int = 0
    readers_stalled: int = 0
    connections_refused: int = 0
    tool_calls: int = 0
    broken_tool_calls: int = 0
    requests: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By route and outcome."""
    key_requests: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By the name of the API key, as are the following. What is over is counted."""
    key_tokens: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By name and whether they were of prompts or of answers."""
    quota_refusals: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By name and limit."""
    streams_resumed: int = 0
    """Streams of stored responses that were read again, from their beginning or from where a client was cut off."""
    failed_authentications: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By reason."""


@dataclass(frozen=True)
class ClusterReading:
    """What the front end knows of its workers at the moment of the scrape."""

    workers: Mapping[str, WorkerStats] = field(default_factory=dict)
    links_lost: int = 0
    stalls: int = 0
    decisions: Mapping[str, int] = field(default_factory=dict)
    diversions: Mapping[str, int] = field(default_factory=dict)
    load: Mapping[str, float] = field(default_factory=dict)
    index_blocks: Mapping[str, int] = field(default_factory=dict)
    queued: int = 0
    migrations: Mapping[str, int] = field(default_factory=dict)
    sessions: int = 0
    session_events: Mapping[str, int] = field(default_factory=dict)
    transcript_tokens: Mapping[str, int] = field(default_factory=dict)
    transcript_bytes: int = 0
    store_is_available: bool = True
    tasks: int = 0
    responses_stored: int = 0
    response_store_bytes: int = 0


class FrontEndMetrics:
    """Declares, collects and renders them all."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._registry = CollectorRegistry()
        self.time_to_first_token = Histogram(
            "penstock_time_to_first_token_seconds",
            "From the request's arrival to its first token, as the front end sees it.",
            buckets=(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
            registry=self._registry,
        )

    def observe(self, read: Callable[[], ClusterReading]) -> None:
        """Says where the workers' figures come from."""
        self._registry.register(_Snapshot(self.tally, read))

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _Snapshot(Collector):
    def __init__(self, tally: Tally, read: Callable[[], ClusterReading]) -> None:
        self._tally = tally
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        reading = self._read()
        yield from self._load(reading)
        yield from self._engines(reading)
        yield from self._token_path()
        yield from self._keys()
        yield from self._routing(reading)
        yield from self._sessions(reading)
        yield from self._responses(reading)

    def _load(self, reading: ClusterReading) -> Iterator[Metric]:
        tally = self._tally
        running: Samples = {("frontend", "frontend"): tally.running}
        queued: Samples = {("frontend", "frontend"): tally.queued}
        blocks: Samples = {}
        for name, stats in reading.workers.items():
            running["worker", name] = stats.running
            queued["worker", name] = stats.queued
            blocks[name, "used"] = stats.kv_blocks_used
            blocks[name, "cached"] = stats.kv_blocks_cached
            blocks[name, "leased"] = stats.kv_blocks_leased
            blocks[name, "total"] = stats.kv_blocks_total
        labels = ("role", "name")
        yield _gauge("penstock_requests_running", "Requests (worker: generations) that are being computed or streamed.", running, labels)
        yield _gauge("penstock_requests_queued", "Requests (worker: generations) that have not begun.", queued, labels)
        yield _gauge(
            "penstock_kv_blocks", "KV blocks in use, kept for reuse, under a lease (of either), and in all.", blocks, ("name", "state")
        )
        workers = reading.workers.items()
        yield _gauge("penstock_sessions", "Sessions that hold a lease.", {(name,): stats.sessions for name, stats in workers}, ("name",))
        yield _gauge("penstock_workers", "Workers with a live link.", {(): len(reading.workers)})

    def _engines(self, reading: ClusterReading) -> Iterator[Metric]:
        """What each worker has counted since its start."""
        label, workers = ("name",), reading.workers.items()
        prompt: Samples = {}
        for name, stats in workers:
            prompt[name, "computed"] = stats.prompt_tokens - stats.prompt_tokens_cached
            prompt[name, "cached"] = stats.prompt_tokens_cached
        yield _counter("penstock_prompt_tokens", "Prompt tokens, by whether their KV was reused.", prompt, ("name", "source"))
        evicted: Samples = {(name,): stats.kv_blocks_evicted for name, stats in workers}
        yield _counter("penstock_kv_blocks_evicted", "KV blocks that made room for others.", evicted, label)
        preempted: Samples = {(name,): stats.preemptions for name, stats in workers}
        yield _counter("penstock_preemptions", "Generations that made room for older ones, to be computed anew.", preempted, label)

    def _routing(self, reading: ClusterReading) -> Iterator[Metric]:
        reason = ("reason",)
        yield _counter("penstock_links_lost", "Links to workers that broke.", {(): reading.links_lost})
        yield _counter("penstock_workers_stalled", "Links given up because a worker owed tokens and was silent.", {(): reading.stalls})
        text = "Generations sent to a worker, by the reason of the choice."
        yield _counter("penstock_routing_decisions", text, _by_label(reading.decisions), reason)
        text = "Generations that did not go to the worker of their session or key, by the reason."
        yield _counter("penstock_routing_diversions", text, _by_label(reading.diversions), reason)
        text = "Generations that went on with another worker, by what ended them on the one before."
        yield _counter("penstock_migrations", text, _by_label(reading.migrations), reason)
        yield _gauge("penstock_generations_queued", "Generations that no worker has room for.", {(): reading.queued})
        text = "Load of a worker in KV blocks, as the router reckons it."
        yield _gauge("penstock_router_load_blocks", text, _by_label(reading.load), ("name",))
        text = "KV blocks of a worker that the router knows or expects."
        yield _gauge("penstock_router_index_blocks", text, _by_label(reading.index_blocks), ("name",))

    def _sessions(self, reading: ClusterReading) -> Iterator[Metric]:
        yield _gauge("penstock_sessions_known", "Sessions that this front end has had a turn of.", {(): reading.sessions})
        text = "What became of sessions at this front end."
        yield _counter("penstock_session_events", text, _by_label(reading.session_events), ("event",))
        text = "Tokens of chat prompts, by whether an earlier turn of their session had them."
        yield _counter("penstock_chat_tokens", text, _by_label(reading.transcript_tokens), ("source",))
        yield _gauge("penstock_transcript_bytes", "Memory that sessions' earlier turns take.", {(): reading.transcript_bytes})
        text = "Whether the store of sessions can be reached."
        yield _gauge("penstock_store_available", text, {(): int(reading.store_is_available)})
        yield _gauge("penstock_tasks", "Tasks of the front end's event loop.", {(): reading.tasks})

    def _responses(self, reading: ClusterReading) -> Iterator[Metric]:
        yield _counter("penstock_responses_stored", "Responses that were made here and stored.", {(): reading.responses_stored})
        yield _counter("penstock_streams_resumed", "Streams that a client came back to.", {(): self._tally.streams_resumed})
        yield _gauge("penstock_response_store_bytes", "What the store of responses holds.", {(): reading.response_store_bytes})

    def _token_path(self) -> Iterator[Metric]:
        tally = self._tally
        yield _counter("penstock_tokens_delivered", "Tokens handed to clients.", {(): tally.tokens_delivered})
        yield _counter("penstock_writes", "Writes of streamed events; each holds all that was pending.", {(): tally.writes})
        yield _counter("penstock_late_puts", "Deltas that came after their reader had left.", {(): tally.late_puts})
        yield _counter("penstock_clients_left", "Requests whose client went away before the end.", {(): tally.clients_left})
        yield _counter("penstock_readers_stalled", "Streams cut off because their reader took nothing.", {(): tally.readers_stalled})
        yield _counter("penstock_connections_refused", "Connections refused for want of file descriptors.", {(): tally.connections_refused})
        yield _counter("penstock_requests", "Requests by route and outcome.", dict(tally.requests), ("route", "outcome"))

        calls: Samples = {("whole",): tally.tool_calls, ("broken",): tally.broken_tool_calls}
        yield _counter("penstock_tool_calls", "Calls of tools in answers; broken ones came back as text.", calls, ("outcome",))

    def _keys(self) -> Iterator[Metric]:
        """Keys are known by their names alone."""
        tally = self._tally
        yield _counter("penstock_key_requests", "Generating requests that are over, by API key.", dict(tally.key_requests), ("key",))
        yield _counter("penstock_key_tokens", "Tokens of prompts and of answers, by API key.", dict(tally.key_tokens), ("key", "kind"))
        text = "Requests refused because of a limit of their API key."
        yield _counter("penstock_quota_refusals", text, dict(tally.quota_refusals), ("key", "limit"))
        text = "Requests refused for want of an API key, or for one that is not known."
        yield _counter("penstock_failed_authentications", text, dict(tally.failed_authentications), ("reason",))


def _by_label(values: Mapping[str, float]) -> Samples:
    return {(label,): value for label, value in values.items()}


def _gauge(name: str, text: str, values: Mapping[tuple[str, ...], float], labels: tuple[str, ...] = ()) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), values)


def _counter(name: str, text: str, values: Mapping[tuple[str, ...], float], labels: tuple[str, ...] = ()) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), values)


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[tuple[str, ...], float]
) -> GaugeMetricFamily | CounterMetricFamily:
    for labels, value in values.items():
        family.add_metric(list(labels), value)
    return family
