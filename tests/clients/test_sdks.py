"""OpenAI's and Anthropic's own libraries drive the server, at the versions of the development environment."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

from clients.conftest import Play
from clients.upstream import InTurn, tool_call

PROGRAMS = Path(__file__).parent / "programs"


def test_an_append_loop_of_openais_client(play: Play) -> None:
    script = InTurn(tool_call("weather", city="Rome") + tool_call("weather", city="Oslo"), "Both are sunny.", "You are welcome.")
    scene = play("openai (Python)", version("openai"), script)
    done = scene.run(sys.executable, PROGRAMS / "openai_append.py")
    assert done.stdout.strip() == "You are welcome."
    assert "Rome: sunny" in scene.prompts[1].text
    turns = scene.turns()
    assert [turn.share for turn in turns] == [1.0, 1.0], list(map(str, turns))
