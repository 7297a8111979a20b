"""The engine's settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """`token_budget` is the most tokens that a step computes, prompts and answers together: the longer a step, the longer everybody waits
    for the next token. `reproducible`: the same rounding whatever is computed together, as far as the matrix library gives it."""

    context_length: int
    kv_pages: int
    page_size: int = 16
    max_batch: int = 256
    token_budget: int = 512
    lease_share: float = 0.5
    max_sessions: int = 1024
    session_grace: float = 30.0
    reproducible: bool = False
