"""What an engine of others gives in the version that is installed. `penstock doctor` prints it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Feature:
    """One thing that an engine may be able to do. `detail` says how, or why not."""

    name: str
    is_available: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """`version` is None where the engine is not installed, `supported` the range that we know to work, in words. `problem` is why it
    cannot be used as it is."""

    engine: str
    version: str | None
    supported: str
    problem: str | None = None
    features: tuple[Feature, ...] = ()
