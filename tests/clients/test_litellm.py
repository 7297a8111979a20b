"""litellm drives the server."""

from __future__ import annotations

from pathlib import Path

from clients.conftest import Play
from clients.setup import RECIPES, set_up
from clients.upstream import InTurn, tool_call

PROGRAMS = Path(__file__).parent / "programs"
VERSION = RECIPES["litellm"].version("litellm")


def test_an_append_loop(play: Play) -> None:
    script = InTurn(tool_call("weather", city="Rome") + tool_call("weather", city="Oslo"), "Both are sunny.", "You are welcome.")
    scene = play("litellm", VERSION, script)
    done = scene.run(set_up("litellm"), PROGRAMS / "litellm_append.py")
    assert done.stdout.strip() == "You are welcome."
    assert "Rome: sunny" in scene.prompts[1].text
    turns = scene.turns()
    assert [turn.share for turn in turns] == [1.0, 1.0], list(map(str, turns))
