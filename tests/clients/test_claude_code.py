"""Claude Code drives the server, set up as docs/guides/claude-code.md says."""

from __future__ import annotations

import base64
import json
import re
import struct
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clients.conftest import Play
from clients.scene import Scene
from clients.setup import RECIPES, set_up
from clients.upstream import InTurn, Prompt, Script, tool_call

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "claude-code.md").read_text(encoding="utf-8")
PROGRAMS = Path(__file__).parent / "programs"
[SETTINGS] = re.findall(r"```bash\n(.*?)```", GUIDE, re.DOTALL)
[JSON_SETTINGS] = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
PLACEHOLDER = "PNG, left out: this model reads only text]"
MIN_SHARE = 0.97


def begin(play: Play, script: Script, **options: Any) -> Scene:
    return play("Claude Code", RECIPES["claude"].version("@anthropic-ai/claude-code"), script, **options)


def claude(scene: Scene, *arguments: str, stdin: str = "") -> list[dict[str, Any]]:
    """Runs one session with the settings of the guide. Returns its messages."""
    flags = ("-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions", *arguments)
    # As root it asks for a sandbox before it runs commands unasked.
    done = scene.run("bash", "-euc", f'{SETTINGS}\nexec "$0" "$@"', set_up("claude"), *flags, stdin=stdin, IS_SANDBOX="1")
    return [json.loads(line) for line in done.stdout.splitlines()]


def answer(said: Sequence[dict[str, Any]]) -> str:
    result = said[-1]
    assert (result["type"], result["is_error"]) == ("result", False), result
    return str(result["result"])


def png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = zlib.compress(b"".join(b"\0" + bytes([200, 30, 30] * 16) for _ in range(16)))
    header = struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def bash(command: str) -> str:
    return tool_call("Bash", command=command, description="runs it")


def search(query: str) -> str:
    return tool_call("ToolSearch", query=query, max_results=5)


def subagent(prompt: str) -> str:
    return tool_call("Agent", description="a helper", prompt=prompt, subagent_type="general-purpose", run_in_background=False)


def agent_of(prompt: Prompt) -> str:
    return "subagent" if "You are an agent for Claude Code" in prompt.text[:2000] else "main"


def test_a_command(play: Play) -> None:
    scene = begin(play, InTurn("I will run it." + bash("echo $((40 + 2))"), "It said 42."))
    assert answer(claude(scene, "Run it.")) == "It said 42."
    assert "<tool_response>\n42" in scene.prompts[1].text
    [turn] = scene.turns(agent_of)
    assert turn.share == 1.0, turn


def test_tools_that_are_searched_for(play: Play) -> None:
    scene = begin(play, InTurn(search("select:CronList"), tool_call("CronList"), search("select:WebFetch,CronDelete"), "Found."))
    assert answer(claude(scene, "Look for tools.")) == "Found."
    described = '<function>{"description":'
    assert [prompt.text.count(described) for prompt in scene.prompts] == [0, 1, 1, 3]
    assert "DeferredToolPlaceholder" not in scene.prompts[0].text
    assert "No scheduled jobs" in scene.prompts[2].text
    turns = scene.turns(agent_of)
    assert [turn.share for turn in turns] == [1.0] * 3, list(map(str, turns))


def test_an_image_in_a_result(play: Play) -> None:
    scene = begin(play, InTurn(tool_call("Read", file_path="red.png"), bash("echo on"), "It goes on."))
    (scene.work / "red.png").write_bytes(png())
    assert answer(claude(scene, "Look at it.")) == "It goes on."
    assert scene.posts("/v1/messages")[1].json["messages"][-1]["content"][0]["content"][0]["type"] == "image"
    assert [prompt.text.count(PLACEHOLDER) for prompt in scene.prompts] == [0, 1, 1]
    assert [turn.share for turn in scene.turns(agent_of)] == [1.0] * 2


def test_an_image_of_the_user(play: Play) -> None:
    """It is refused once. Claude Code leaves it out and goes on, in this turn and the next."""
    scene = begin(play, InTurn("I saw no image.", "Still here."))
    scene.expect(status=400, path="/v1/messages", text="Could not process image")
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png()).decode()}
    asked = [[{"type": "text", "text": "What is this?"}, {"type": "image", "source": source}], "And now?"]
    lines = [json.dumps({"type": "user", "message": {"role": "user", "content": content}}) for content in asked]
    assert answer(claude(scene, "--input-format", "stream-json", stdin="\n".join(lines))) == "Still here."
    refused, _ = scene.refusals
    assert len(refused) == 1
    assert "Image removed" in scene.prompts[0].text
    # Claude Code takes its own replacement out of the next turn: a new beginning.
    scene.turns(prompts=scene.prompts[1:])


def test_a_pdf_in_a_result(play: Play) -> None:
    scene = begin(play, InTurn(tool_call("Read", file_path="page.pdf"), "It goes on."))
    objects = ("<</Type/Catalog/Pages 2 0 R>>", "<</Type/Pages/Kids[3 0 R]/Count 1>>", "<</Type/Page/Parent 2 0 R>>")
    body = "\n".join(f"{number} 0 obj{each}endobj" for number, each in enumerate(objects, 1))
    (scene.work / "page.pdf").write_text(f"%PDF-1.4\n{body}\ntrailer<</Root 1 0 R>>\n%%EOF\n")
    assert answer(claude(scene, "Read it.")) == "It goes on."
    assert "[document left out: this model cannot read it]" in scene.prompts[1].text


def test_a_search_of_the_web_fails_and_the_session_goes_on(play: Play) -> None:
    scene = begin(play, InTurn(tool_call("WebSearch", query="penstock"), "There is no search."))
    scene.expect(status=400, path="/v1/messages", text="this server has no tools of its own")
    assert answer(claude(scene, "Search.")) == "There is no search."
    assert [turn.share for turn in scene.turns(agent_of)] == [1.0]


def test_what_fills_the_context(play: Play) -> None:
    """It counts every tool and every part of its instructions by itself, all in its session."""
    scene = begin(play, InTurn(bash("echo on"), "Before.", "After."))
    assert answer(claude(scene, "Begin.")) == "Before."
    claude(scene, "--continue", "/context")
    assert len(scene.posts("/v1/messages/count_tokens")) > 10
    assert answer(claude(scene, "--continue", "Go on.")) == "After."
    assert [turn.share for turn in scene.turns(agent_of)] == [1.0] * 2


def test_the_settings_as_a_file(play: Play) -> None:
    fetch = tool_call("WebFetch", url="https://penstock.example/", prompt="What is it?")
    scene = begin(play, InTurn(bash("echo $((40 + 2))"), search("select:WebFetch"), fetch, "It said 42."))
    # Nothing of Anthropic's is asked before that.
    scene.may_ask = {"CONNECT penstock.example:443"}
    replaced = {"http://localhost:8000": scene.url, "MODEL": scene.model}
    (scene.home / ".claude").mkdir()
    settings = re.sub(r"(?<=\")(http://localhost:8000|MODEL)(?=\")", lambda found: replaced[found[0]], JSON_SETTINGS)
    (scene.home / ".claude" / "settings.json").write_text(settings)
    flags = ("-p", "Run it.", "--output-format", "json", "--allowedTools", "Bash,WebFetch")
    # What the harness sets is not there: only the file counts.
    unset = [f"-u{name}" for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC")]
    done = json.loads(scene.run("env", *unset, set_up("claude"), *flags).stdout)
    assert done["result"] == "It said 42."
    assert "WebSearch" not in scene.prompts[0].text
    assert "CronList" in scene.prompts[0].text
    assert set(scene.outside.asked) == scene.may_ask
    assert [turn.share for turn in scene.turns(agent_of)] == [1.0] * 3


def test_a_subagent(play: Play) -> None:
    scripts = {"main": InTurn(subagent("List the files."), "The helper is done."), "subagent": InTurn(bash("ls"), "There is one file.")}
    scene = begin(play, lambda prompt: scripts[agent_of(prompt)](prompt))
    (scene.work / "only.txt").touch()
    assert answer(claude(scene, "Send a helper.")) == "The helper is done."
    turns = scene.turns(agent_of)
    assert [turn.share for turn in turns] == [1.0] * 2, list(map(str, turns))
    assert "There is one file." in scene.prompts[-1].text
    names = [(one.headers["x-claude-code-session-id"], one.headers.get("x-claude-code-agent-id")) for one in scene.posts("/v1/messages")]
    sessions = {f"{session}/{agent}" if agent else session for session, agent in names}
    assert len(sessions) == 2
    assert sessions <= scene.sessions


def compacts(prompt: Prompt) -> bool:
    return "CRITICAL: Respond with TEXT ONLY" in prompt.text[-20_000:]


def summarized(then: str) -> Script:
    """Fills the context with the output of commands until a summary is asked for; answers the prompt after that."""

    def script(prompt: Prompt) -> str:
        if compacts(prompt):
            return "<analysis>Much was printed.</analysis>\n<summary>Numbers were printed.</summary>"
        if "This session is being continued" in prompt.text:
            return then
        return bash("seq 100000 103500")

    return script


def test_it_compacts_before_the_context_is_full(play: Play) -> None:
    scene = begin(play, summarized("Compacted in time."), context_length=80_000)
    said = claude(scene, "Print numbers.")
    assert answer(said) == "Compacted in time."
    assert [one["compact_metadata"]["trigger"] for one in said if one.get("subtype") == "compact_boundary"] == ["auto"]
    assert "Numbers were printed." in scene.prompts[-1].text
    assert scene.refusals == ([], [])


def test_it_compacts_when_the_server_says_that_the_prompt_is_too_long(play: Play) -> None:
    scene = begin(play, summarized("Compacted late."), context_length=80_000)
    scene.expect(status=400, path="/v1/messages", text="prompt is too long: ")
    # Claude Code believes in more than there is.
    said = claude(scene, "--settings", json.dumps({"env": {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": "400000"}}), "Print numbers.")
    assert answer(said) == "Compacted late."
    assert [one["compact_metadata"]["trigger"] for one in said if one.get("subtype") == "compact_boundary"] == ["auto"]
    refused, _ = scene.refusals
    assert refused


def test_a_long_session(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    """Tools, tools that come later, images, a subagent, a second process that continues: whatever was computed once is used again."""
    helper = InTurn(
        bash("ls"), tool_call("Read", file_path="notes.txt"), search("select:WebFetch"), bash("wc notes.txt"), "The helper has read it."
    )
    first = InTurn(
        "I begin." + bash("echo one"),
        search("select:CronList"),
        tool_call("CronList"),
        tool_call("Write", file_path="notes.txt", content="line\n" * 40),
        tool_call("Read", file_path="notes.txt"),
        tool_call("Edit", file_path="notes.txt", old_string="line\nline\nline\n", new_string="other\n"),
        tool_call("Read", file_path="red.png"),
        search("measure"),
        tool_call("mcp__dam__measure", at="upper"),
        search("select:mcp__dam__drain"),
        tool_call("mcp__dam__drain", at="upper"),
        "Two at once." + bash("echo two") + bash("echo three; exit 3"),
        tool_call("Read", file_path="missing.txt"),
        subagent("Read the notes."),
        *[f"Step {number}." + bash(f"seq {number} {number + 50}") for number in range(8)],
        tool_call("Read", file_path="red.png"),
        "Now I stop.",
    )
    second = InTurn(bash("cat notes.txt"), search("+cron"), *[bash(f"echo {number}") for number in range(3)], "All is done.")
    scripts = {"main": first, "subagent": helper}
    scene = begin(play, lambda prompt: scripts[agent_of(prompt)](prompt))
    (scene.work / "red.png").write_bytes(png())
    servers = {"dam": {"command": sys.executable, "args": [str(PROGRAMS / "growing_mcp.py")]}}
    flags = ("--mcp-config", json.dumps({"mcpServers": servers}), "--strict-mcp-config")
    assert answer(claude(scene, *flags, "--", "Do the work.")) == "Now I stop."
    scripts["main"] = second
    assert answer(claude(scene, *flags, "--continue", "--", "And the rest.")) == "All is done."
    turns = scene.turns(agent_of)
    assert len(turns) == 33
    shares = [turn.share for turn in turns]
    reused = sum(turn.shared for turn in turns) / sum(turn.reusable for turn in turns)
    with capsys.disabled():
        print(f"\nClaude Code, {len(scene.prompts)} turns: {reused:.2%} of what could be reused, the lowest turn {min(shares):.2%}")
    assert min(shares) >= MIN_SHARE, [str(turn) for turn in turns if turn.share < MIN_SHARE]
    assert scene.prompts[-1].text.count(PLACEHOLDER) == 4
    assert scene.refusals == ([], [])
