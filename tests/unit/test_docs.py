"""The documentation is one book: links lead somewhere, and what it names exists."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from penstock.metrics.frontend import ClusterReading, FrontEndMetrics, Tally

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
FRAGMENT = re.compile(r"\]\(([^)#\s:]*)#([^)\s]+)\)")
OPERATIONS = sorted((ROOT / "docs" / "operations").glob("*.md"))


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def links(page: Path) -> list[str]:
    return [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    broken = [link for link in links(page) if not (page.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_to_headings_lead_to_one(page: Path) -> None:
    found = FRAGMENT.findall(page.read_text(encoding="utf-8"))
    assert [f"{link}#{fragment}" for link, fragment in found if fragment not in fragments(page.parent / link if link else page)] == []


def fragments(page: Path) -> set[str]:
    """The names of a page's headings in links, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link).resolve() for link in links(index)}
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs") and page.parent.name != "decisions" and page != index}
    assert pages <= listed


def test_the_readme_fits_on_two_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


def metric_names() -> set[str]:
    metrics = FrontEndMetrics(Tally())
    metrics.observe(ClusterReading)
    return set(re.findall(r"^# TYPE (\S+)", metrics.render(with_keys=True).decode(), re.MULTILINE))


@pytest.mark.parametrize("page", OPERATIONS, ids=named)
def test_metrics_that_operations_name_exist(page: Path) -> None:
    # A histogram's series have suffixes that its name does not have.
    found = {re.sub(r"_bucket$", "", name) for name in re.findall(r"\bpenstock_[a-z_]+\b", page.read_text(encoding="utf-8"))}
    assert found <= metric_names()


def test_the_map_has_every_file() -> None:
    spec = importlib.util.spec_from_file_location("map_tables", ROOT / "docs" / "map_tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    written = (ROOT / "docs" / "map.md").read_text(encoding="utf-8").partition(module.MARKER)[2]
    assert written == module.tables(), "run `make docs`"


def test_files_that_the_map_names_exist() -> None:
    named_files = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|lua))`", (ROOT / "docs" / "map.md").read_text(encoding="utf-8")))
    missing = [name for name in named_files if not (ROOT / "src" / "penstock" / name).exists() and not (ROOT / name).exists()]
    assert not missing
