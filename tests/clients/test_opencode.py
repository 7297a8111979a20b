"""OpenCode with the settings of docs/guides/opencode.md, on each API that it can speak."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from clients.conftest import Play
from clients.scene import Scene
from clients.setup import RECIPES, set_up
from clients.upstream import Prompt, tool_call

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "opencode.md").read_text(encoding="utf-8")
(SETTINGS,) = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
APIS = dict(re.findall(r"^\| `(@ai-sdk/[a-z-]+)` \| `(/v1/[a-z/]+)`", GUIDE, re.MULTILINE))
VERSION = RECIPES["opencode"].version("opencode-linux-x64-baseline")
MIN_SHARE = 0.97
CONTEXT = 32_000
# The guide says so.
REGISTRY = "CONNECT registry.npmjs.org:443"


class OpenCode:
    """OpenCode in a scene, set up as the guide says."""

    def __init__(self, scene: Scene, package: str, context: int = 150_000) -> None:
        self.scene = scene
        scene.may_ask = {REGISTRY}
        settings = SETTINGS.replace("@ai-sdk/openai-compatible", package)
        for old, new in (("http://localhost:8000", scene.url), ("my-model", scene.model), ("131072", str(context))):
            settings = settings.replace(old, new)
        (scene.work / "opencode.json").write_text(settings)

    def run(self, *arguments: str, is_checked: bool = True) -> list[dict[str, Any]]:
        """`opencode run`. Returns its events: what its user sees."""
        command = ("run", "--format", "json", *arguments)
        done = self.scene.run(set_up("opencode"), *command, seconds=90, is_checked=is_checked, PENSTOCK_API_KEY="sk-made-up")
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def texts(events: list[dict[str, Any]]) -> list[str]:
    return [event["part"]["text"] for event in events if event["type"] == "text"]


def is_title(prompt: Prompt) -> bool:
    return "Generate a title for this conversation" in prompt.text


def test_the_guide_names_three_apis() -> None:
    assert sorted(APIS.values()) == ["/v1/chat/completions", "/v1/messages", "/v1/responses"]


@pytest.mark.parametrize("package", APIS)
def test_a_tool_and_a_resumed_session(play: Play, package: str) -> None:
    def script(prompt: Prompt) -> str:
        if is_title(prompt):
            return "A greeting"
        if "and again" in prompt.text:
            return "It still says hello."
        return "It said hello." if "<tool_response>" in prompt.text else tool_call("bash", command="echo hel''lo", description="Says it")

    scene = play("OpenCode", VERSION, script)
    client = OpenCode(scene, package)
    first = client.run("say hello")
    (used,) = [event["part"]["state"] for event in first if event["type"] == "tool_use"]
    assert (used["status"], used["output"]) == ("completed", "hello\n")
    assert texts(first) == ["It said hello."]
    again = client.run("--session", first[0]["sessionID"], "and again")
    assert texts(again) == ["It still says hello."]
    assert {one.path for one in scene.exchanges} == {APIS[package]}
    assert "say hello" in scene.prompts[-1].text
    assert first[0]["sessionID"] in scene.sessions
    turns = scene.turns(is_title)
    assert len(turns) == 2
    assert min(turn.share for turn in turns) >= MIN_SHARE, list(map(str, turns))


@pytest.mark.parametrize("package", APIS)
def test_it_compacts_when_the_server_says_that_the_prompt_is_too_long(play: Play, package: str) -> None:
    """It believes in more context than there is, so only the words of the error can tell it."""

    def script(prompt: Prompt) -> str:
        if is_title(prompt):
            return "Numbers"
        if "<tool_response>" not in prompt.text and "count" in prompt.text[-200:]:
            return tool_call("bash", command="seq -s ' ' 1 6000", description="Counts")
        return "The numbers were counted."

    scene = play("OpenCode", VERSION, script, context_length=CONTEXT)
    words = f"prompt is too long: .* > {CONTEXT} maximum" if "anthropic" in package else f"maximum context length is {CONTEXT} tokens"
    # On a stream of Responses it is an event.
    scene.expect(status=200 if APIS[package] == "/v1/responses" else 400, path=APIS[package], text=words.partition(".*")[0])
    events = OpenCode(scene, package).run("count to 6000", is_checked=False)
    (error,) = [event["error"] for event in events if event["type"] == "error"]
    assert error["name"] == "ContextOverflowError"
    assert re.search(words, error["data"]["message"])
    assert texts(events)[-1] == "The numbers were counted."
    assert "17 18 19" not in scene.prompts[-1].text, "it goes on with a summary"
    assert max(len(prompt.token_ids) for prompt in scene.prompts) < CONTEXT
