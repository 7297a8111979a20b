"""Libraries that agents are built with drive the server."""

from __future__ import annotations

import json
from pathlib import Path

from clients.conftest import Play
from clients.setup import RECIPES, set_up
from clients.upstream import Prompt, tool_call
from clients.weather import CITY, SUNNY, WELCOME, weather

PROGRAMS = Path(__file__).parent / "programs"
RECIPE = RECIPES["libraries"]


def guide(prompt: Prompt) -> str:
    """Hands over to the clerk when it is asked to."""
    last = prompt.text.rsplit("<|im_start|>user\n", 1)[1]
    return tool_call("transfer_to_clerk") if "Hand me over" in last and "You are a guide" in prompt.text else weather(prompt)


def test_openai_agents(play: Play) -> None:
    scene = play("openai-agents", RECIPE.version("openai-agents"), guide)
    done = scene.run(set_up("libraries"), PROGRAMS / "openai_agents.py")
    assert done.stdout.splitlines() == [WELCOME, "structured", f"Clerk {SUNNY}"] * 2
    turns = scene.turns()
    assert len(turns) == 4 * 2
    assert {turn.share for turn in turns} == {1.0}, list(map(str, turns))


def test_pydantic_ai(play: Play) -> None:
    scene = play("pydantic-ai", RECIPE.version("pydantic-ai-slim"), weather)
    done = scene.run(set_up("libraries"), PROGRAMS / "pydantic_agent.py")
    assert done.stdout.splitlines() == [WELCOME, "structured"] * 3
    turns = scene.turns()
    assert len(turns) == 4 * 3
    assert {turn.share for turn in turns} == {1.0}, list(map(str, turns))


def picky(prompt: Prompt) -> str:
    """Rome; but Oslo when that was wrong."""
    answer = weather(prompt) if "it must be Oslo" not in prompt.text else ""
    if answer:
        return answer
    city = {**CITY, "city": "Oslo"}
    return tool_call("Picky", **city) if "by tool" in prompt.text else json.dumps(city)


def test_instructor(play: Play) -> None:
    scene = play("instructor", RECIPE.version("instructor"), picky)
    done = scene.run(set_up("libraries"), PROGRAMS / "instructor_modes.py")
    assert done.stdout.splitlines() == ["tool_call", "json_mode", "json_schema_mode", "anthropic_tools"]
    turns = scene.turns()
    assert len(turns) == 4
    assert {turn.share for turn in turns} == {1.0}, list(map(str, turns))


def test_langchain(play: Play) -> None:
    scene = play("langchain", RECIPE.version("langchain"), weather)
    done = scene.run(set_up("libraries"), PROGRAMS / "langchain_agent.py")
    assert done.stdout.splitlines()[:3] == [WELCOME] * 3
    turns = scene.turns()
    assert len(turns) == 4 * 3
    assert {turn.share for turn in turns} == {1.0}, list(map(str, turns))


def test_a_prompt_that_is_too_long(play: Play) -> None:
    """langchain looks for OpenAI's and Anthropic's own words. The event of a stream of Responses it makes a ValueError of."""
    scene = play("langchain", RECIPE.version("langchain"), weather, context_length=20_000)
    for path in ("/v1/chat/completions", "/v1/responses"):
        scene.expect(status=400, path=path, text="context_length_exceeded")
    scene.expect(status=200, path="/v1/responses", text="context_length_exceeded")
    scene.expect(status=400, path="/v1/messages", text="prompt is too long")
    done = scene.run(set_up("libraries"), PROGRAMS / "langchain_overflow.py")
    of_openai, of_anthropic = "OpenAIContextOverflowError", "AnthropicContextOverflowError"
    expected = [*[of_openai] * 3, "ValueError True", *[of_anthropic] * 2, "context_length_exceeded"]
    assert done.stdout.splitlines() == expected, scene.told(done)
    assert not scene.prompts
