"""Programs that wait for a long prompt: they take what the server sends meanwhile, and do not give up."""

from __future__ import annotations

import json
import time

from clients.conftest import Play
from clients.scene import Scene
from clients.setup import RECIPES, set_up
from clients.upstream import InTurn, Prompt

OFTEN = ("--keep-alive", "0.5")
PROMPT_SECONDS = 4.0
"""How long the engine takes for its first token."""

IDLE_SECONDS = 2.0
"""Less than that. Codex gives up after this time without an event."""

CODEX = """
model = "{model}"
model_provider = "penstock"
model_context_window = 100000

[model_providers.penstock]
name = "Penstock"
base_url = "{url}/v1"
wire_api = "responses"
stream_idle_timeout_ms = {idle}

[analytics]
enabled = false

[features]
plugins = false
"""


def slowly(_: Prompt) -> str:
    time.sleep(PROMPT_SECONDS)
    return "It took a while."


def keep_alives(scene: Scene, path: str, sign: bytes) -> int:
    (exchange,) = scene.posts(path)
    return bytes(exchange.answer).count(sign)


def test_codex(play: Play) -> None:
    scene = play("Codex", RECIPES["codex"].version("@openai/codex"), InTurn(slowly), *OFTEN)
    (scene.home / ".codex").mkdir()
    settings = CODEX.format(model=scene.model, url=scene.url, idle=int(IDLE_SECONDS * 1000))
    (scene.home / ".codex" / "config.toml").write_text(settings)
    done = scene.run(set_up("codex"), "exec", "--skip-git-repo-check", "Take your time.", seconds=60)
    assert "It took a while." in done.stdout
    assert keep_alives(scene, "/v1/responses", b"event: response.in_progress") > 2


def test_claude_code(play: Play) -> None:
    scene = play("Claude Code", RECIPES["claude"].version("@anthropic-ai/claude-code"), InTurn(slowly), *OFTEN)
    flags = ("--print", "--output-format=json", "Take your time.")
    done = scene.run(set_up("claude"), *flags, ANTHROPIC_MODEL=scene.model, ANTHROPIC_SMALL_FAST_MODEL=scene.model)
    assert json.loads(done.stdout)["result"] == "It took a while."
    assert keep_alives(scene, "/v1/messages", b"event: ping") > 2
