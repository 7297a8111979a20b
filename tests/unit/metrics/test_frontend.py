"""Every metric is declared once, shown, and in the reference."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.metrics.frontend import DECLARATIONS, ClusterReading, FrontEndMetrics, Tally, reference
from penstock.wire.messages import WorkerStats

REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"

STATS = WorkerStats(
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
    load={"a": 1.5},
    index_blocks={"a": 9},
    session_events={"opened": 4},
    transcript_tokens={"reused": 5},
    responses_evicted={"full": 2},
)


def rendered() -> str:
    tally = Tally(running=8, tool_calls=3)
    for counter, labels in [
        (tally.requests, ("chat", "ok")),
        (tally.key_requests, ("alice",)),
        (tally.key_tokens, ("alice", "prompt")),
        (tally.quota_refusals, ("alice", "concurrency")),
        (tally.failed_authentications, ("missing",)),
        (tally.limits_reached, ("max_body_bytes",)),
    ]:
        counter[labels] += 1
    metrics = FrontEndMetrics(tally)
    metrics.observe(lambda: READING)
    return metrics.render().decode()


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
