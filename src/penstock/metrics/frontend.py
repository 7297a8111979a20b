"""Every metric of the front end, declared once. `reference()` makes docs/reference/metrics.md from the declarations.

The token path counts plain integers (`Tally`). They become metrics only when somebody asks.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from penstock.metrics.loop_watch import STALL_BUCKETS, LoopWatch
from penstock.wire.messages import WorkerStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KEY_LABEL = "key"
REMOVED_KEYS = "(removed)"
"""The label of all keys that are no longer in the key file: else labels would grow with every key that ever was."""
BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)

Samples = dict[tuple[str, ...], float]
"""Values by their labels."""


@dataclass
class Tally:
    """What the front end counts."""

    running: int = 0
    queued: int = 0
    tokens_delivered: int = 0
    writes: int = 0
    keep_alives: int = 0
    late_puts: int = 0
    clients_left: int = 0
    readers_stalled: int = 0
    connections_refused: int = 0
    first_tokens: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    """Requests by the time to their first token: one count per bucket, and one for those above all of them."""
    first_token_seconds: float = 0.0
    tool_calls: int = 0
    broken_tool_calls: int = 0
    requests: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By route and outcome."""
    key_requests: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By key name. Counted when the request is over."""
    key_tokens: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By key name and kind: prompt or completion."""
    quota_refusals: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By key name and limit."""
    limits_reached: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By the name of the limit: a setting, a limit of a key, or the field whose size is limited."""
    streams_resumed: int = 0
    """Streams that a client read again, from the start or from where it was cut off."""
    streams_evicted: int = 0
    failed_authentications: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By reason."""
    pages_refused: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By reason."""
    stalls: list[int] = field(default_factory=lambda: [0] * (len(STALL_BUCKETS) + 1))
    """Stalls of the event loop by their length, like `first_tokens`."""
    stall_seconds: float = 0.0
    longest_stall: float = 0.0
    """Since the last scrape."""

    def forget_key(self, name: str) -> None:
        """Counts what a key has used under REMOVED_KEYS: it is no longer in the key file."""
        for counts in (self.key_requests, self.key_tokens, self.quota_refusals):
            for labels in [labels for labels in counts if labels[0] == name]:
                counts[REMOVED_KEYS, *labels[1:]] += counts.pop(labels)


@dataclass(frozen=True)
class MediaReading:
    """What the front end's reader of images has done, and what it holds."""

    images: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    """By source and outcome."""
    bytes: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    decoders_lost: Mapping[str, int] = field(default_factory=dict)
    pictures: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class ClusterReading:
    """What the front end knows about its workers at the moment of the scrape."""

    workers: Mapping[str, WorkerStats] = field(default_factory=dict)
    links_lost: int = 0
    stalls: int = 0
    decisions: Mapping[str, int] = field(default_factory=dict)
    diversions: Mapping[str, int] = field(default_factory=dict)
    load: Mapping[str, float] = field(default_factory=dict)
    index_blocks: Mapping[str, int] = field(default_factory=dict)
    queued: int = 0
    key_generations: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    migrations: Mapping[str, int] = field(default_factory=dict)
    prefill_choices: Mapping[str, int] = field(default_factory=dict)
    transfers: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    """Transfers of KV that have ended, by reason and outcome."""
    transfers_open: int = 0
    transfer_bytes: Mapping[str, int] = field(default_factory=dict)
    transfer_durations: Sequence[int] = (0,) * (len(BUCKETS) + 1)
    transfer_seconds: float = 0.0
    encode_jobs: Mapping[str, int] = field(default_factory=dict)
    """Images that encode workers made for others, by outcome."""
    encode_jobs_open: int = 0
    encode_durations: Sequence[int] = (0,) * (len(BUCKETS) + 1)
    encode_seconds: float = 0.0
    stopped: int = 0
    suspects: int = 0
    sessions: int = 0
    session_events: Mapping[str, int] = field(default_factory=dict)
    transcript_tokens: Mapping[str, int] = field(default_factory=dict)
    transcript_bytes: int = 0
    store_is_available: bool = True
    tasks: int = 0
    body_bytes: int = 0
    answer_bytes: int = 0
    bodies_waiting: int = 0
    turns_waiting: int = 0
    responses_stored: int = 0
    responses_evicted: Mapping[str, int] = field(default_factory=dict)
    response_store_bytes: int = 0
    media: MediaReading = MediaReading()


class Declaration(NamedTuple):
    """One metric. Counters get the suffix `_total` when they are shown."""

    kind: Literal["counter", "gauge"]
    name: str
    labels: tuple[str, ...]
    read: Callable[[Tally, ClusterReading], float | Mapping[str, float] | Mapping[tuple[str, ...], float]]
    help: str

    def collect(self, tally: Tally, reading: ClusterReading) -> Metric:
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = make(self.name, self.help, labels=self.labels)
        value = self.read(tally, reading)
        for labels, sample in value.items() if isinstance(value, Mapping) else [((), value)]:
            family.add_metric([labels] if isinstance(labels, str) else list(labels), sample)
        return family


def _both(front_end: int, reading: ClusterReading, name: str) -> Samples:
    """A figure of the front end, and the same figure of each worker."""
    samples: Samples = {("worker", worker): value for worker, value in _of_workers(reading, name).items()}
    return {("frontend", "frontend"): front_end, **samples}


def _of_workers(reading: ClusterReading, name: str) -> dict[str, float]:
    return {worker: getattr(stats, name) for worker, stats in reading.workers.items()}


def _kv_blocks(reading: ClusterReading) -> Samples:
    states = ("used", "cached", "leased", "total")
    return {(worker, state): count for state in states for worker, count in _of_workers(reading, f"kv_blocks_{state}").items()}


def _transfers_held(reading: ClusterReading) -> Samples:
    return {(worker, side): count for side in ("export", "import") for worker, count in _of_workers(reading, f"{side}s").items()}


def _tier_blocks(reading: ClusterReading) -> Samples:
    places = [(tier, state) for tier in ("host", "disk") for state in ("blocks", "total")]
    samples = {(*place, worker): count for place in places for worker, count in _of_workers(reading, f"kv_{'_'.join(place)}").items()}
    return {(worker, tier, "stored" if state == "blocks" else state): count for (tier, state, worker), count in samples.items()}


def _tier_events(reading: ClusterReading) -> Samples:
    return {
        (worker, *event.split(" ", 1)): count for worker, stats in reading.workers.items() for event, count in stats.kv_tier_events.items()
    }


def _tier_rates(reading: ClusterReading) -> Samples:
    tiers = ("host", "disk")
    return {(worker, tier): rate for tier in tiers for worker, rate in _of_workers(reading, f"{tier}_rate").items() if rate}


def _prompt_tokens(reading: ClusterReading) -> Samples:
    samples: Samples = {}
    for worker, stats in reading.workers.items():
        samples[worker, "computed"] = stats.prompt_tokens - stats.prompt_tokens_cached
        samples[worker, "cached"] = stats.prompt_tokens_cached
    return samples


def _images(reading: ClusterReading) -> Samples:
    sources = ("encoded", "reused")
    return {(worker, source): count for source in sources for worker, count in _of_workers(reading, f"images_{source}").items()}


def _tool_calls(tally: Tally) -> dict[str, float]:
    return {"whole": tally.tool_calls, "broken": tally.broken_tool_calls}


FIRST_TOKEN_SECONDS = (
    "penstock_time_to_first_token_seconds",
    "Seconds from the arrival of a request to its first token, as the front end sees it.",
)

TRANSFER_SECONDS = (
    "penstock_kv_transfer_seconds",
    "Seconds that transfers of KV between workers took, as the worker saw it that pulled. Blocks that were still computed are waited for.",
)

ENCODE_SECONDS = (
    "penstock_encode_seconds",
    "Seconds from sending an image to an encode worker until the worker that needs it has its features.",
)

STALL_SECONDS = (
    "penstock_loop_stall_seconds",
    "Stalls of the front end's event loop while it has requests: nothing else runs meanwhile. Stalls under 5 ms are not counted.",
)

HISTOGRAMS = (FIRST_TOKEN_SECONDS, STALL_SECONDS, TRANSFER_SECONDS, ENCODE_SECONDS)

# fmt: off
DECLARATIONS = (
    # Load.
    Declaration("gauge", "penstock_requests_running", ("role", "name"), lambda tally, reading: _both(tally.running, reading, "running"),
        "Front end: requests that are being answered. Worker: generations that are being computed."),
    Declaration("gauge", "penstock_requests_queued", ("role", "name"), lambda tally, reading: _both(tally.queued, reading, "queued"),
        "Front end: requests without a first token. Worker: generations that have not begun."),
    Declaration("gauge", "penstock_generations_queued", (), lambda _, reading: reading.queued,
        "Generations that wait in the front end because no worker has room."),
    Declaration("gauge", "penstock_workers", (), lambda _, reading: len(reading.workers),
        "Workers with a live link."),
    Declaration("gauge", "penstock_tasks", (), lambda _, reading: reading.tasks,
        "Tasks of the front end's event loop."),
    Declaration("gauge", "penstock_loop_longest_stall_seconds", (), lambda tally, _: tally.longest_stall,
        "Longest stall of the front end's event loop since the last scrape."),
    # What each worker holds, and what it has counted since its start.
    Declaration("gauge", "penstock_kv_blocks", ("name", "state"), lambda _, reading: _kv_blocks(reading),
        "KV blocks of a worker. used: by generations; cached: kept for reuse; leased: of both, under a lease; total: all."),
    Declaration("gauge", "penstock_kv_transfers_held", ("name", "side"), lambda _, reading: _transfers_held(reading),
        "Transfers of KV that a worker has open. export: others pull from it; import: it pulls."),
    Declaration("gauge", "penstock_kv_tier_blocks", ("name", "tier", "state"), lambda _, reading: _tier_blocks(reading),
        "KV blocks of a worker below its device. host: in host memory; disk: on disk. stored: there now; total: that have room."),
    Declaration("counter", "penstock_kv_tier_events", ("name", "tier", "event"), lambda _, reading: _tier_events(reading),
        "KV blocks of a worker below its device, by what happened. stored: came there; loaded: were used again; evicted: made room; "
        "declined: not loaded, because computing was faster. Dropped: full: no room on disk, or all slots busy; busy: the disk "
        "was too slow; corrupt: not what was written; error: an I/O error; stalled: the disk did not answer."),
    Declaration("gauge", "penstock_kv_tier_rate_bytes", ("name", "tier"), lambda _, reading: _tier_rates(reading),
        "Bytes per second that a worker loads from a tier, as measured."),
    Declaration("gauge", "penstock_sessions", ("name",), lambda _, reading: _of_workers(reading, "sessions"),
        "Sessions with a lease on the worker."),
    Declaration("counter", "penstock_sessions_evicted", ("name",), lambda _, reading: _of_workers(reading, "sessions_evicted"),
        "Sessions that a worker ended to give another tenant its share of --max-sessions."),
    Declaration("counter", "penstock_prompt_tokens", ("name", "source"), lambda _, reading: _prompt_tokens(reading),
        "Prompt tokens of a worker. cached: their KV was reused; computed: it was not."),
    Declaration("counter", "penstock_images", ("name", "source"), lambda _, reading: _images(reading),
        "Images of a worker. encoded: its tower made their features; reused: it had them."),
    Declaration("gauge", "penstock_image_positions_queued", ("name",), lambda _, reading: _of_workers(reading, "image_positions_to_encode"),
        "Positions of images that a worker must encode."),
    Declaration("counter", "penstock_kv_blocks_evicted", ("name",), lambda _, reading: _of_workers(reading, "kv_blocks_evicted"),
        "KV blocks that a worker evicted to make room."),
    Declaration("counter", "penstock_preemptions", ("name",), lambda _, reading: _of_workers(reading, "preemptions"),
        "Generations that a worker stopped to make room for older ones, and computed again later."),
    Declaration("counter", "penstock_memory_failures", ("name",), lambda _, reading: _of_workers(reading, "memory_failures"),
        "Steps of a worker that ran out of memory and were computed in smaller ones."),
    # The token path.
    Declaration("counter", "penstock_requests", ("route", "outcome"), lambda tally, _: tally.requests,
        "Requests that have ended, by route and outcome."),
    Declaration("counter", "penstock_tokens_delivered", (), lambda tally, _: tally.tokens_delivered,
        "Tokens delivered to clients."),
    Declaration("counter", "penstock_writes", (), lambda tally, _: tally.writes,
        "Writes of streamed events. One write has all tokens that were waiting."),
    Declaration("counter", "penstock_keep_alives", (), lambda tally, _: tally.keep_alives,
        "Writes without an event, to clients that wait: comments, pings, white space."),
    Declaration("counter", "penstock_late_puts", (), lambda tally, _: tally.late_puts,
        "Deltas that arrived after their reader had left."),
    Declaration("counter", "penstock_clients_left", (), lambda tally, _: tally.clients_left,
        "Requests whose client disconnected before the end."),
    Declaration("counter", "penstock_readers_stalled", (), lambda tally, _: tally.readers_stalled,
        "Streams that were cut off because the client read nothing for too long."),
    Declaration("counter", "penstock_connections_refused", (), lambda tally, _: tally.connections_refused,
        "Connections refused because there were no file descriptors left."),
    Declaration("counter", "penstock_tool_calls", ("outcome",), lambda tally, _: _tool_calls(tally),
        "Tool calls in answers. whole: returned as a call; broken: not valid, returned as text."),
    Declaration("counter", "penstock_limits_reached", ("limit",), lambda tally, _: tally.limits_reached,
        "Requests refused because of a limit: a setting, a limit of their API key, or the field that is too large."),
    Declaration("gauge", "penstock_answer_bytes", (), lambda _, reading: reading.answer_bytes,
        "Bytes of answers without generations that clients have not taken yet. The limit is --answer-memory."),
    Declaration("gauge", "penstock_body_bytes", (), lambda _, reading: reading.body_bytes,
        "Bytes of request bodies that are being read, decoded or tokenized. The limit is --body-memory."),
    Declaration("gauge", "penstock_bodies_waiting", (), lambda _, reading: reading.bodies_waiting,
        "Requests whose body waits for room."),
    Declaration("gauge", "penstock_tokenizations_waiting", (), lambda _, reading: reading.turns_waiting,
        "Long prompts that wait for their next turn in a thread that tokenizes."),
    # API keys, by name. Shown only with PENSTOCK_METRICS_KEY or --metrics-address.
    Declaration("gauge", "penstock_key_generations", (KEY_LABEL, "state"), lambda _, reading: reading.key_generations,
        "Generations of an API key that have not ended. waiting: no worker has room for them; running: the others."),
    Declaration("counter", "penstock_key_requests", ("key",), lambda tally, _: tally.key_requests,
        "Generating requests that have ended, by name of the API key."),
    Declaration("counter", "penstock_key_tokens", ("key", "kind"), lambda tally, _: tally.key_tokens,
        "Tokens of prompts and of answers, by name of the API key."),
    Declaration("counter", "penstock_quota_refusals", ("key", "limit"), lambda tally, _: tally.quota_refusals,
        "Requests refused because a limit of their API key was reached."),
    Declaration("counter", "penstock_failed_authentications", ("reason",), lambda tally, _: tally.failed_authentications,
        "Requests refused without a valid API key. missing: no key; unknown: a wrong one."),
    Declaration("counter", "penstock_pages_refused", ("reason",), lambda tally, _: tally.pages_refused,
        "Requests refused because a web page may have made them: host_not_allowed, origin_not_allowed, unsupported_media_type."),
    # Routing.
    Declaration("counter", "penstock_links_lost", (), lambda _, reading: reading.links_lost,
        "Links to workers that broke."),
    Declaration("counter", "penstock_workers_stalled", (), lambda _, reading: reading.stalls,
        "Links that were given up because the worker owed tokens and was silent."),
    Declaration("counter", "penstock_routing_decisions", ("reason",), lambda _, reading: reading.decisions,
        "Generations sent to a worker, by the reason for the choice."),
    Declaration("counter", "penstock_routing_diversions", ("reason",), lambda _, reading: reading.diversions,
        "Generations that did not go to the worker of their session or key. gone: no link; quiet: silent; overloaded: too busy."),
    Declaration("counter", "penstock_migrations", ("reason",), lambda _, reading: reading.migrations,
        "Generations that continued on another worker, by the code of the fault that ended them on the first."),
    Declaration("counter", "penstock_prefill_choices", ("choice",), lambda _, reading: reading.prefill_choices,
        "Generations for which a prefill worker was free. elsewhere: it computed the prompt; here: the decode worker did, as that was "
        "cheaper; cached: the decode worker had it."),
    Declaration("counter", "penstock_kv_transfers", ("reason", "outcome"), lambda _, reading: reading.transfers,
        "Transfers of KV between workers that have ended. done, failed: what the pulling worker reports; cancelled: the generation ended; "
        "lost: a worker was lost; stalled: it took too long. Missing KV was computed."),
    Declaration("gauge", "penstock_kv_transfers_open", (), lambda _, reading: reading.transfers_open,
        "Transfers of KV between workers that have not ended."),
    Declaration("counter", "penstock_kv_transfer_bytes", ("reason",), lambda _, reading: reading.transfer_bytes,
        "Bytes of KV that workers pulled from each other."),
    Declaration("counter", "penstock_encode_jobs", ("outcome",), lambda _, reading: reading.encode_jobs,
        "Images that encode workers encoded for other workers. done: its features were pulled; failed: they were not made or not pulled; "
        "lost: the encode worker was lost; cancelled: no worker needed them any more. After two failures the worker encodes it itself."),
    Declaration("gauge", "penstock_encode_jobs_open", (), lambda _, reading: reading.encode_jobs_open,
        "Images that encode workers make now, or that have not been pulled yet."),
    Declaration("gauge", "penstock_generations_suspected", (), lambda _, reading: reading.suspects,
        "Generations of a worker that died, which wait to be tried alone on another."),
    Declaration("counter", "penstock_generations_stopped", (), lambda _, reading: reading.stopped,
        "Generations that were stopped because several workers died while they ran them."),
    Declaration("gauge", "penstock_router_load_blocks", ("name",), lambda _, reading: reading.load,
        "Load of a worker in KV blocks, as the router estimates it."),
    Declaration("gauge", "penstock_router_index_blocks", ("name",), lambda _, reading: reading.index_blocks,
        "KV blocks of a worker in the router's index, known or predicted."),
    # Sessions.
    Declaration("gauge", "penstock_sessions_known", (), lambda _, reading: reading.sessions,
        "Open sessions that had a turn at this front end."),
    Declaration("counter", "penstock_session_events", ("event",), lambda _, reading: reading.session_events,
        "Events of sessions at this front end: opened, moved, expired, closed, over_quota, unknown."),
    Declaration("counter", "penstock_chat_tokens", ("source",), lambda _, reading: reading.transcript_tokens,
        "Prompt tokens of chats. reused: tokenized in an earlier turn of the session; encoded: tokenized now."),
    Declaration("gauge", "penstock_transcript_bytes", (), lambda _, reading: reading.transcript_bytes,
        "Memory for the tokens of sessions' earlier turns."),
    Declaration("gauge", "penstock_store_available", (), lambda _, reading: int(reading.store_is_available),
        "1 if the store of sessions is used; 0 while it cannot be reached or is too slow."),
    # Stored responses.
    Declaration("counter", "penstock_responses_stored", (), lambda _, reading: reading.responses_stored,
        "Responses that this front end stored."),
    Declaration("counter", "penstock_responses_evicted", ("reason",), lambda _, reading: reading.responses_evicted,
        "Responses and conversations that this front end deleted. expired: by age; full: to make room."),
    Declaration("counter", "penstock_streams_resumed", (), lambda tally, _: tally.streams_resumed,
        "Streams that a client continued to read after a disconnect."),
    Declaration("counter", "penstock_streams_evicted", (), lambda tally, _: tally.streams_evicted,
        "Resumable streams that were dropped before their time because the memory for them was full."),
    # Images.
    Declaration("counter", "penstock_images_read", ("source", "outcome"), lambda _, reading: reading.media.images,
        "Images of requests that the front end read. source: data (in the request) or http (fetched). outcome: decoded; cached: the same "
        "file was decoded before; refused: the client's fault; failed: the server's."),
    Declaration("counter", "penstock_image_bytes", ("source",), lambda _, reading: reading.media.bytes,
        "Bytes of the files of these images."),
    Declaration("counter", "penstock_image_seconds", ("phase",), lambda _, reading: reading.media.seconds,
        "Seconds that reading images took. fetch: from other servers; decode: in the processes that decode."),
    Declaration("counter", "penstock_image_decoders_lost", ("reason",), lambda _, reading: reading.media.decoders_lost,
        "Processes that ended while they decoded an image. slow: it took too long; crashed: of the image; killed: by somebody; "
        "overloaded: no answer for a minute; missing: Pillow is not installed."),
    Declaration("gauge", "penstock_pictures", ("state",), lambda _, reading: reading.media.pictures,
        "Images that the front end holds, decoded. cached: for later requests; all: those that requests use, too."),
    Declaration("gauge", "penstock_media_memory_bytes", (), lambda _, reading: reading.media.memory_bytes,
        "Memory for images: decoded ones, and those that are being read. The limit is --media-memory."),
    Declaration("gauge", "penstock_images_waiting", (), lambda _, reading: reading.media.waiting,
        "Images that wait for memory, for a process that decodes, or to be fetched."),
    Declaration("gauge", "penstock_response_store_bytes", (), lambda _, reading: reading.response_store_bytes,
        "Size of the store of responses."),
)
# fmt: on


class FrontEndMetrics:
    """Collects and renders all metrics of one front end."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.loop = LoopWatch(tally)
        self._registries = {with_keys: CollectorRegistry() for with_keys in (False, True)}

    def observe(self, read: Callable[[], ClusterReading]) -> None:
        """Sets where the figures of the workers come from."""
        for with_keys, registry in self._registries.items():
            registry.register(_Collector(self.tally, read, with_keys))

    def render(self, with_keys: bool = False) -> bytes:
        """`with_keys`: also what has a label of API keys, which not everybody may see."""
        return generate_latest(self._registries[with_keys])


class _Collector(Collector):
    def __init__(self, tally: Tally, read: Callable[[], ClusterReading], with_keys: bool) -> None:
        self._tally = tally
        self._read = read
        self._with_keys = with_keys

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        reading, tally = self._read(), self._tally
        yield _histogram(FIRST_TOKEN_SECONDS, BUCKETS, tally.first_tokens, tally.first_token_seconds)
        yield _histogram(STALL_SECONDS, STALL_BUCKETS, tally.stalls, tally.stall_seconds)
        yield _histogram(TRANSFER_SECONDS, BUCKETS, reading.transfer_durations, reading.transfer_seconds)
        yield _histogram(ENCODE_SECONDS, BUCKETS, reading.encode_durations, reading.encode_seconds)
        for declaration in DECLARATIONS:
            if self._with_keys or KEY_LABEL not in declaration.labels:
                yield declaration.collect(tally, reading)
        tally.longest_stall = 0.0


def _histogram(described: tuple[str, str], buckets: tuple[float, ...], counts: Sequence[int], total: float) -> Metric:
    bounds = [*map(floatToGoString, buckets), "+Inf"]
    return HistogramMetricFamily(*described, list(zip(bounds, accumulate(counts), strict=True)), total)


def reference() -> str:
    """The page docs/reference/metrics.md."""
    rows = [f"| `{name}` | histogram | | {text} |" for name, text in HISTOGRAMS]
    for kind, name, labels, _, text in DECLARATIONS:
        shown = f"{name}_total" if kind == "counter" else name
        rows.append(f"| `{shown}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {text} |")
    introduction = "Generated by `python -m penstock.metrics.frontend`. A front end shows these at `GET /metrics`; those with "
    introduction += "the label `key` only with `--metrics-address` or `PENSTOCK_METRICS_KEY`."
    return "\n".join(["# Metrics", "", introduction, "", "| name | type | labels | meaning |", "|---|---|---|---|", *rows, ""])


if __name__ == "__main__":
    sys.stdout.write(reference())
