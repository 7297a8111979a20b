"""Every metric is declared once, shown, and in the reference."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.metrics.frontend import DECLARATIONS, REMOVED_KEYS, ClusterReading, FrontEndMetrics, MediaReading, Tally, reference
from penstock.wire.messages import WorkerStats

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"

STATS = WorkerStats(
    host_rate=1e9,
    kv_tier_events={"host loaded": 5, "disk declined": 2},
    running=3,
    queued=2,
    kv_blocks_used=5,
    kv_blocks_cached=6,
    kv_blocks_total=20,
    kv_blocks_leased=4,
    prompt_tokens=100,
    prompt_tokens_cached=60,
)
READING = ClusterReading(
    workers={"a": STATS},
    decisions={"prefix": 7},
    diversions={"gone": 1},
    migrations={"worker_lost": 2},
    prefill_choices={"elsewhere": 3},
    encode_jobs={"done": 4, "lost": 1},
    transfers={("drain", "done"): 2},
    transfer_bytes={"drain": 4096},
    load={"a": 1.5},
    index_blocks={"a": 9},
    session_events={"opened": 4},
    transcript_tokens={"reused": 5},
    responses_evicted={"full": 2},
    key_generations={("alice", "waiting"): 3},
    media=MediaReading(
        images={("data", "decoded"): 3}, bytes={"data": 9}, seconds={"fetch": 0.5}, decoders_lost={"slow": 1}, pictures={"all": 2}
    ),
)


def rendered(with_keys: bool = True) -> str:
    tally = Tally(running=8, tool_calls=3)
    for counter, labels in [
        (tally.requests, ("chat", "ok")),
        (tally.key_requests, ("alice",)),
        (tally.key_tokens, ("alice", "prompt")),
        (tally.quota_refusals, ("alice", "concurrency")),
        (tally.failed_authentications, ("missing",)),
        (tally.limits_reached, ("max_body_bytes",)),
        (tally.pages_refused, ("host_not_allowed",)),
    ]:
        counter[labels] += 1
    metrics = FrontEndMetrics(tally)
    metrics.observe(lambda: READING)
    return metrics.render(with_keys).decode()


def test_names_of_keys_are_only_shown_to_who_may_see_them() -> None:
    assert "alice" in rendered()
    without = rendered(with_keys=False)
    assert "alice" not in without
    assert not re.findall(r"key=|^# TYPE penstock_key_", without, re.MULTILINE)
    assert "penstock_requests_total" in without


def test_a_key_that_is_removed_leaves_no_label() -> None:
    tally = Tally()
    for name in ("a", "b", "c"):
        tally.key_requests[name,] += 2
        tally.key_tokens[name, "prompt"] += 10
        tally.quota_refusals[name, "concurrency"] += 1
    tally.forget_key("a")
    tally.forget_key("b")
    assert tally.key_requests == {("c",): 2, (REMOVED_KEYS,): 4}
    assert tally.key_tokens == {("c", "prompt"): 10, (REMOVED_KEYS, "prompt"): 20}
    assert tally.quota_refusals == {("c", "concurrency"): 1, (REMOVED_KEYS, "concurrency"): 2}


def test_the_reference_is_up_to_date() -> None:
    """If not: python -m penstock.metrics.frontend > docs/reference/metrics.md."""
    assert REFERENCE.read_text(encoding="utf-8") == reference()


def test_the_reference_has_exactly_the_metrics_that_are_shown() -> None:
    shown = set(re.findall(r"^# TYPE (\S+) (\S+)$", rendered(), re.MULTILINE))
    listed = set(re.findall(r"^\| `(\w+)` \| (\w+) \|", reference(), re.MULTILINE))
    created = {(name, kind) for name, kind in shown if name.endswith("_created")}
    assert shown - created == listed


def test_every_metric_has_its_own_name_and_a_sentence_of_help() -> None:
    names = [declaration.name for declaration in DECLARATIONS]
    assert len(set(names)) == len(names)
    assert all(name.startswith("penstock_") for name in names)
    assert all(declaration.help.endswith(".") for declaration in DECLARATIONS)


def test_every_sample_has_the_labels_of_its_declaration() -> None:
    lines = rendered().splitlines()
    for declaration in DECLARATIONS:
        name = f"{declaration.name}_total" if declaration.kind == "counter" else declaration.name
        samples = [line for line in lines if re.match(rf"{name}[ {{]", line)]
        assert samples, name
        for sample in samples:
            assert set(re.findall(r'(\w+)="', sample)) == set(declaration.labels), sample


def test_figures_of_the_front_end_and_of_its_workers() -> None:
    shown = set(rendered().splitlines())
    assert {
        'penstock_requests_running{name="frontend",role="frontend"} 8.0',
        'penstock_requests_running{name="a",role="worker"} 3.0',
        'penstock_kv_blocks{name="a",state="leased"} 4.0',
        'penstock_prompt_tokens_total{name="a",source="computed"} 40.0',
        'penstock_prompt_tokens_total{name="a",source="cached"} 60.0',
        'penstock_tool_calls_total{outcome="whole"} 3.0',
        'penstock_tool_calls_total{outcome="broken"} 0.0',
    } <= shown
