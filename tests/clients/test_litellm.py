"""litellm drives the server."""

from __future__ import annotations

from pathlib import Path

from clients.conftest import Play
from clients.setup import RECIPES, set_up
from clients.weather import WELCOME, weather

PROGRAMS = Path(__file__).parent / "programs"
SANITISED = "[System: Empty message content sanitised"
VERSION = RECIPES["litellm"].version("litellm")


def test_loops(play: Play) -> None:
    scene = play("litellm", VERSION, weather)
    done = scene.run(set_up("litellm"), PROGRAMS / "litellm_loops.py")
    assert done.stdout.splitlines() == [*[WELCOME] * 6, "structured"], scene.told(done)
    turns = scene.turns(prompts=[prompt for prompt in scene.prompts if "It is sunny." not in prompt.text])
    assert len(turns) == 4 * 2
    # Over Anthropic's API, litellm writes a sentence of its own into an answer that was streamed and has only calls.
    changed = [turn for turn in turns if SANITISED in turn.prompt.text and SANITISED not in turn.before.text]
    assert len(changed) == 1
    assert {turn.share for turn in turns if turn not in changed} == {1.0}, list(map(str, turns))


def test_a_prompt_that_is_too_long(play: Play) -> None:
    """litellm looks for OpenAI's and Anthropic's own words, and raises its ContextWindowExceededError."""
    scene = play("litellm", VERSION, weather, context_length=20_000)
    scene.expect(status=400, path="/v1/chat/completions", text="context_length_exceeded")
    scene.expect(status=400, path="/v1/messages", text="prompt is too long")
    done = scene.run(set_up("litellm"), PROGRAMS / "litellm_overflow.py")
    assert done.stdout.splitlines() == ["too long"] * 4, scene.told(done)
    assert not scene.prompts
