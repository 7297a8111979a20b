"""OpenAI's and Anthropic's own libraries drive the server, at the versions of the development environment."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

from clients.conftest import Play
from clients.weather import WELCOME, weather

PROGRAMS = Path(__file__).parent / "programs"


def test_append_loops_of_openais_client(play: Play) -> None:
    scene = play("openai (Python)", version("openai"), weather)
    done = scene.run(sys.executable, PROGRAMS / "openai_sdk.py")
    assert done.stdout.splitlines() == [WELCOME] * 7
    turns = scene.turns()
    assert len(turns) == 6 * 2 + 1
    assert {turn.share for turn in turns} == {1.0}, list(map(str, turns))


def test_append_loops_of_anthropics_client(play: Play) -> None:
    scene = play("anthropic (Python)", version("anthropic"), weather)
    done = scene.run(sys.executable, PROGRAMS / "anthropic_sdk.py")
    assert done.stdout.splitlines() == [WELCOME] * 3
    turns = scene.turns()
    assert len(turns) == 2 * 2 + 1
    assert {turn.share for turn in turns} == {1.0}, list(map(str, turns))
