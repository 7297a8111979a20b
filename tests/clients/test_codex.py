"""Codex with the settings of docs/guides/codex.md. Everything that it sends is recorded, and what the model sees is asserted."""

from __future__ import annotations

import json
import re
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clients.conftest import Play
from clients.scene import Scene
from clients.setup import RECIPES, set_up
from clients.upstream import InTurn, Prompt, Script, tool_call

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "codex.md").read_text(encoding="utf-8")
SETTINGS, PRIVATE, USE_CATALOG, MCP = re.findall(r"```toml\n(.*?)```", GUIDE, re.DOTALL)
(CATALOG,) = re.findall(r"```json\n(.*?)```", GUIDE, re.DOTALL)
MCP_SERVER = Path(__file__).parent / "programs" / "mcp_server.py"
VERSION = RECIPES["codex"].version("@openai/codex")
# A tool may do whatever it wants: the programs that the model calls are those of these tests.
FLAGS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json")

# As many published templates are: `developer` is unknown, and a system message counts only at the head. Thinking is kept.
THINKING = """\
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') + '\\n<tools>' }}
{%- for tool in tools or [] %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nWrite <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}{{ '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


class Codex:
    """Codex in a scene, set up as the guide says."""

    def __init__(self, scene: Scene, *, mcp: bool = False, catalog: bool = False, window: int = 150_000) -> None:
        self.scene = scene
        settings = (USE_CATALOG if catalog else "") + SETTINGS + PRIVATE
        if mcp:
            settings += MCP.replace("python3", sys.executable).replace("/path/to/server.py", str(MCP_SERVER))
        self._write("config.toml", settings, window)
        if catalog:
            self._write("penstock.json", CATALOG, window)

    def _write(self, name: str, text: str, window: int) -> None:
        path = self.scene.home / ".codex" / name
        path.parent.mkdir(exist_ok=True)
        for old, new in (("http://localhost:8000", self.scene.url), ("my-model", self.scene.model), ("32768", str(window))):
            text = text.replace(old, new)
        path.write_text(text)

    def run(self, *arguments: str, is_checked: bool = True) -> list[dict[str, Any]]:
        """`codex exec`. Returns its events: what its user sees."""
        command = ("exec", *arguments[:-1], *FLAGS, arguments[-1])
        done = self.scene.run(set_up("codex"), *command, is_checked=is_checked, PENSTOCK_API_KEY="sk-made-up")
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


Begin = Callable[..., Codex]


@pytest.fixture
def begin(play: Play) -> Begin:
    def begin_with(script: Script, *, context_length: int = 200_000, template: str = "", **settings: Any) -> Codex:
        return Codex(play("Codex", VERSION, script, context_length=context_length, template=template), **settings)

    return begin_with


def items(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event["item"] for event in events if event["type"] == "item.completed" and event["item"]["type"] == kind]


def said(events: list[dict[str, Any]]) -> str:
    return str(items(events, "agent_message")[-1]["text"])


def assert_reused(scene: Scene, count: int) -> float:
    """Every turn but the first of each agent begins with all of the prompt and the answer before it.

    Less than all is a few tokens: an answer that is rendered in other words than the model's. Returns the least share.
    """
    turns = scene.turns(is_subagent)
    shares = [turn.share for turn in turns]
    assert shares == [1.0] * count, list(map(str, turns))
    return min(shares)


SPAWN = tool_call("multi_agent_v1__spawn_agent", message="Count the rivers.")


def wait(prompt: Prompt) -> str:
    """Waits for the agent that was started last."""
    agent = re.findall(r'"agent_id": ?"([0-9a-f-]+)"', prompt.text)[-1]
    return tool_call("multi_agent_v1__wait_agent", targets=[agent], timeout_ms=30_000)


class Team:
    """A script for an agent, and one for its subagents, which cannot start others."""

    def __init__(self, agent: Script, subagent: Script) -> None:
        self._agent, self._subagent = agent, subagent

    def __call__(self, prompt: Prompt) -> str:
        return (self._subagent if is_subagent(prompt) else self._agent)(prompt)


def is_subagent(prompt: Prompt) -> bool:
    return "multi_agent_v1__spawn_agent" not in prompt.text.partition("</tools>")[0]


def test_a_command(begin: Begin) -> None:
    codex = begin(InTurn(tool_call("exec_command", cmd="echo from the shell"), "It is done."))
    events = codex.run("Run it.")
    assert said(events) == "It is done."
    assert items(events, "command_execution")[0]["aggregated_output"] == "from the shell\n"
    assert "from the shell" in codex.scene.prompts[1].text
    assert_reused(codex.scene, 1)


def test_a_template_that_knows_no_developers_and_a_model_that_thinks(begin: Begin) -> None:
    """All instructions of Codex are developer messages. It sends thinking back, and the model reads it as it wrote it."""
    call = "<think>I must look.\nNow.</think>" + tool_call("exec_command", cmd="echo from the shell")
    codex = begin(InTurn(call, "<think>Good.</think>It is done.", "<think>Hm.</think>Yes."), template=THINKING)
    assert said(codex.run("Run it.")) == "It is done."
    assert said(codex.run("resume", "--last", "Really?")) == "Yes."
    sent = codex.scene.posts("/v1/responses")[0].json["input"]
    developer = [part["text"] for item in sent if item["role"] == "developer" for part in item["content"]]
    assert len(developer) >= 2
    for text in developer:
        assert text.strip() in codex.scene.prompts[0].text
    assert_reused(codex.scene, 2)


def test_an_mcp_server(begin: Begin) -> None:
    script = InTurn(tool_call("mcp__demo__depth", reservoir="Upper"), "It is 17 metres deep.")
    codex = begin(script, mcp=True)
    events = codex.run("How deep is Upper?")
    assert said(events) == "It is 17 metres deep."
    (call,) = items(events, "mcp_tool_call")
    assert (call["server"], call["tool"], call["status"]) == ("demo", "depth", "completed")
    first, second = codex.scene.prompts
    assert '"mcp__demo__depth"' in first.text
    assert "Upper is 17 metres deep" in second.text
    assert_reused(codex.scene, 1)


def test_a_subagent(begin: Begin) -> None:
    """It is a tool in a namespace, too, and its prompt is another conversation."""
    codex = begin(
        Team(InTurn(SPAWN, wait, "Seven, says the subagent."), InTurn(tool_call("exec_command", cmd="echo 7"), "There are seven."))
    )
    assert said(codex.run("Ask another agent.")) == "Seven, says the subagent."
    threads = [exchange.headers["thread-id"] for exchange in codex.scene.posts("/v1/responses")]
    assert sorted(map(threads.count, set(threads))) == [2, 3]
    assert set(threads) <= codex.scene.sessions
    assert_reused(codex.scene, 3)


def test_resume(begin: Begin) -> None:
    codex = begin(InTurn("Hello.", tool_call("exec_command", cmd="echo again"), "As I said."))
    codex.run("Say hello.")
    assert said(codex.run("resume", "--last", "Say it again.")) == "As I said."
    assert "Say hello." in codex.scene.prompts[1].text
    assert_reused(codex.scene, 2)


def test_a_patch_with_the_catalog(begin: Begin) -> None:
    """`apply_patch` is a custom tool. The catalog also ends Codex's warning that it does not know the model."""
    patch = "*** Begin Patch\n*** Add File: water.txt\n+deep\n*** End Patch"
    codex = begin(InTurn(tool_call("apply_patch", input=patch), "Written."), catalog=True)
    events = codex.run("Write it.")
    assert said(events) == "Written."
    assert not items(events, "error")
    assert (codex.scene.work / "water.txt").read_text() == "deep\n"
    assert "You are a coding agent in a terminal." in codex.scene.prompts[0].text
    assert_reused(codex.scene, 1)


def test_an_image_does_not_end_the_session(begin: Begin) -> None:
    codex = begin(InTurn(tool_call("view_image", path="red.png"), "I cannot see it.", "Still here."))
    (codex.scene.work / "red.png").write_bytes(red_png())
    assert said(codex.run("Look at red.png.")) == "I cannot see it."
    assert said(codex.run("resume", "--last", "Are you there?")) == "Still here."
    sent = codex.scene.posts("/v1/responses")[-1].json["input"]
    assert any(part["type"] == "input_image" for item in sent if isinstance(item.get("output"), list) for part in item["output"])
    assert_reused(codex.scene, 2)


def test_a_message_with_an_image_is_refused_once(begin: Begin) -> None:
    """Codex keeps it in its history."""
    codex = begin(InTurn("Still here."))
    (codex.scene.work / "red.png").write_bytes(red_png())
    codex.scene.expect(status=400, path="/v1/responses", text="images are not supported by this model")
    events = codex.run("-i", "red.png", "Look.", is_checked=False)
    assert "images are not supported by this model" in events[-1]["error"]["message"]
    assert said(codex.run("resume", "--last", "Are you there?")) == "Still here."
    assert [exchange.status for exchange in codex.scene.exchanges] == [400, 200]
    assert "left out: this model reads only text]" in codex.scene.prompts[0].text


def test_a_schema_for_the_last_message(begin: Begin) -> None:
    """Codex sends it with every request. The grammar allows calls, too, or the model could never use a tool."""
    codex = begin(InTurn(tool_call("exec_command", cmd="echo 17"), '{"depth": 17}'))
    schema = {"type": "object", "properties": {"depth": {"type": "integer"}}, "required": ["depth"], "additionalProperties": False}
    (codex.scene.work / "schema.json").write_text(json.dumps(schema))
    assert said(codex.run("--output-schema", "schema.json", "How deep is it?")) == '{"depth": 17}'
    for prompt in codex.scene.prompts:
        grammar = prompt.body["structured_outputs"]["grammar"]
        assert "depth" in grammar
        assert "<tool_call>" in grammar
    assert_reused(codex.scene, 1)


def test_a_prompt_that_is_too_long(begin: Begin) -> None:
    """Codex says in its own words what to do, and does not try again."""
    codex = begin(InTurn(), context_length=4096, window=150_000)
    codex.scene.expect(status=200, path="/v1/responses", text="context_length_exceeded")
    events = codex.run("Hello.", is_checked=False)
    assert events[-1]["type"] == "turn.failed"
    assert "ran out of room in the model's context window" in events[-1]["error"]["message"]
    (exchange,) = codex.scene.posts("/v1/responses")
    assert exchange.events[-1]["response"]["error"]["code"] == "context_length_exceeded"
    assert not codex.scene.prompts


def test_compaction(begin: Begin) -> None:
    """Codex compacts by the usage that it is told, before the context is full, and goes on with the summary.

    It asks for the summary without tools, so that is another prompt from the start.
    """

    def step(prompt: Prompt) -> str:
        if "CONTEXT CHECKPOINT COMPACTION" in prompt.text:
            return "compaction"
        return "after" if "Summary: water was printed." in prompt.text else "before"

    def script(prompt: Prompt) -> str:
        if step(prompt) != "before":
            return {"compaction": "Summary: water was printed.", "after": "Done after compaction."}[step(prompt)]
        return tool_call("exec_command", cmd="yes water | head -c 20000" if "tool_response" in prompt.text else "echo begin")

    codex = begin(script, window=24_000)
    assert said(codex.run("Print water.")) == "Done after compaction."
    assert list(map(step, codex.scene.prompts)) == ["before", "before", "compaction", "after"]
    assert all(len(prompt.token_ids) < 24_000 for prompt in codex.scene.prompts)
    (turn,) = codex.scene.turns(step)
    assert turn.share == 1, str(turn)


def test_a_websocket_is_asked_for_once(begin: Begin) -> None:
    codex = begin(InTurn("Hello."))
    codex.scene.expect(status=426, path="/v1/responses")
    events = codex.run("-c", "model_providers.penstock.supports_websockets=true", "Say hello.")
    assert said(events) == "Hello."
    assert [exchange.status for exchange in codex.scene.exchanges] == [426, 200]
    assert not [event for event in events if event["type"] == "error"]


def test_thirty_turns(begin: Begin, capsys: pytest.CaptureFixture[str]) -> None:
    """A session with commands, MCP tools, patches, a subagent and four resumes."""
    answers = [answer for part in range(5) for answer in answers_of(part)]
    subagent = InTurn(tool_call("mcp__demo__depth", reservoir="Lower"), tool_call("exec_command", cmd="ls"), "There are seven.")
    codex = begin(Team(InTurn(*answers), subagent), mcp=True, catalog=True)
    for part in range(5):
        events = codex.run(*(("resume", "--last") if part else ()), f"Do part {part}.")
        assert said(events) == f"Part {part} is done."
        assert len(items(events, "mcp_tool_call")) == 2
    assert sorted(path.name for path in codex.scene.work.iterdir()) == [f"part{part}.txt" for part in range(5)]
    prompts = codex.scene.prompts
    assert len(prompts) == len(answers) + 3
    least = assert_reused(codex.scene, len(prompts) - 2)
    with capsys.disabled():
        print(f"\nCodex: {len(prompts)} prompts of 2 agents; every turn but the first of each reused at least {least:.2%} of what it could")


def answers_of(part: int) -> list[str | Script]:
    helped: list[str | Script] = [SPAWN, wait] if part == 2 else []
    patch = f"*** Begin Patch\n*** Add File: part{part}.txt\n+{part}\n*** End Patch"
    return [
        tool_call("mcp__demo__depth", reservoir=f"Lake {part}"),
        "Now the rest." + tool_call("exec_command", cmd=f"echo {part}") + tool_call("exec_command", cmd="ls"),
        tool_call("apply_patch", input=patch),
        *helped,
        tool_call("mcp__demo__inflow", reservoir='a "lake"\n<with> unusual & signs'),
        tool_call("exec_command", cmd="seq 1 300"),
        f"Part {part} is done.",
    ]


def red_png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0\xff\0\0")) + chunk(b"IEND", b"")
