"""One test with a real client: the server that it talks to, its clean environment, and what was recorded."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chat_model import make_tokenizer
from clients.prefixes import Turn, turns
from clients.recorder import Exchange, Outside, Recorder
from clients.upstream import Prompt, Script, Upstream
from e2e.harness import Server
from penstock.text.tokenizers.source import pack_tokenizer

MODEL = "test-model"
MADE_UP_KEY = "sk-made-up-0123456789abcdef"
CONTEXT = 200_000

# Nothing is reported, nothing is updated, and nothing from the user's own settings is read.
QUIET = {
    "DO_NOT_TRACK": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "LANGCHAIN_TRACING_V2": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HF_HUB_OFFLINE": "1",
    "PYDANTIC_DISABLE_PLUGINS": "__all__",
    "CI": "1",
    "TERM": "dumb",
    "LANG": "C.UTF-8",
}


@dataclass(frozen=True)
class Stack:
    """A server behind which the scripted engine runs. `Penstock`'s own log is in `server.log`."""

    server: Server
    upstream: Upstream


@contextlib.contextmanager
def running_stack(*arguments: str, template: str = "", context_length: int = CONTEXT, model: str = MODEL) -> Iterator[Stack]:
    """`arguments` are for `penstock serve`."""
    with tempfile.TemporaryDirectory(prefix="clients-") as folder:
        directory = make_tokenizer(Path(folder) / "model", template)
        with Upstream(pack_tokenizer(directory).load(), context_length) as upstream:
            flags = ("--url", upstream.url, "--model", str(directory), "--served-name", model, *arguments)
            state = {"XDG_STATE_HOME": f"{folder}/state", "XDG_CACHE_HOME": f"{folder}/cache"}
            server = Server(*flags, engine="http", model=model, environment=state)
            try:
                yield Stack(server.wait_ready(), upstream)
            finally:
                server.stop()


@dataclass(frozen=True)
class Expected:
    """A refusal that a test announces: a status of 4xx or 5xx, or 200 for an error in an event of a stream."""

    status: int
    path: str
    text: str

    def fits(self, one: Exchange) -> bool:
        is_it = one.status == self.status and self.path in ("", one.path.split("?")[0])
        return one.is_refused and is_it and self.text in one.answer.decode(errors="replace")


@dataclass
class Scene:
    """A client's view of the server, and what was recorded. `url` is the recorder's: give it to the client as the base URL, with `/v1`
    where it expects that. `home` is the client's home, `work` the folder that it runs in. `outside` is what it asked of other machines,
    all of which was refused."""

    client: str
    version: str
    stack: Stack
    recorder: Recorder
    outside: Outside
    home: Path
    work: Path
    expected: list[Expected] = field(default_factory=list)
    may_ask: set[str] = field(default_factory=set)
    """What it may ask of other machines, in vain."""
    counted: list[Turn] | None = None

    @property
    def url(self) -> str:
        return self.recorder.url

    @property
    def model(self) -> str:
        return self.stack.server.model

    @property
    def exchanges(self) -> list[Exchange]:
        """Every request so far, in order."""
        return self.recorder.exchanges

    @property
    def prompts(self) -> list[Prompt]:
        """Every prompt that the engine got, in order."""
        return self.stack.upstream.prompts

    @property
    def sessions(self) -> set[str]:
        """The sessions of the client's key, those of earlier scenes, too."""
        key = {name: value for name, value in self.exchanges[-1].headers.items() if name in ("authorization", "x-api-key")}
        _, _, listed = self.stack.server.request("GET", "/v1/sessions?limit=1000", headers=key)
        return {session["id"] for session in listed["data"]}

    def posts(self, path: str) -> list[Exchange]:
        return [one for one in self.exchanges if one.method == "POST" and one.path.split("?")[0] == path]

    def expect(self, *, status: int, path: str = "", text: str = "") -> None:
        """At least one request to this path is refused with this status and this text, and more may be: 4xx or 5xx, or 200 for an error in
        an event of a stream. Every other refusal fails the test."""
        self.expected.append(Expected(status, path, text))

    @property
    def refusals(self) -> tuple[list[Exchange], list[Exchange]]:
        """Answers of 4xx and 5xx, and errors in streams: those that the test expects, and the others."""
        refused = [one for one in self.exchanges if one.is_refused]
        expected = [one for one in refused if any(each.fits(one) for each in self.expected)]
        return expected, [one for one in refused if one not in expected]

    def turns(self, conversation: Callable[[Prompt], Hashable] | None = None, prompts: list[Prompt] | None = None) -> list[Turn]:
        """See `prefixes.turns`. These turns go into the table; without a call, those of all prompts do. Check their number, too: a prompt
        that shares little begins another conversation."""
        counted = turns(self.prompts if prompts is None else prompts, conversation)
        self.counted = counted
        return counted

    def environment(self, **more: str) -> dict[str, str]:
        """All variables of the client: an empty home, a made-up key, no telemetry, and a proxy that refuses whatever is not loopback."""
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"), self.outside.url)
        keys = {"OPENAI_API_KEY": MADE_UP_KEY, "ANTHROPIC_API_KEY": MADE_UP_KEY}
        addresses = {"OPENAI_BASE_URL": f"{self.url}/v1", "ANTHROPIC_BASE_URL": self.url, "PENSTOCK_URL": self.url, "MODEL": self.model}
        local = {"NO_PROXY": "127.0.0.1,localhost,::1", "no_proxy": "127.0.0.1,localhost,::1"}
        home = {"HOME": str(self.home), "TMPDIR": str(self.home / "tmp"), "PATH": os.environ["PATH"]}
        return {**QUIET, "PYTHONFAULTHANDLER": "1", **proxies, **local, **home, **keys, **addresses, **more}

    def run(
        self, *command: str | Path, seconds: float = 60, stdin: str = "", is_checked: bool = True, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs the client to its end, in `work`, with `environment(**more)`. Whatever it has started ends with it."""
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.work,
            env=self.environment(**more),
            start_new_session=True,
        )
        try:
            out, err = process.communicate(stdin, timeout=seconds)
        except subprocess.TimeoutExpired:
            # A client in Python then tells where it waits: PYTHONFAULTHANDLER.
            os.killpg(process.pid, signal.SIGABRT)
            out, err = process.communicate(timeout=10)
            done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
            raise AssertionError(f"{self.client} did not end within {seconds:g} s\n{self.told(done)}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
        assert not is_checked or done.returncode == 0, f"{self.client} exited with {done.returncode}\n{self.told(done)}"
        return done

    def told(self, done: subprocess.CompletedProcess[str]) -> str:
        """For a failure's message: what the client wrote, and its requests."""
        requests = "\n".join(map(str, self.exchanges[-20:]))
        problems = "\n".join(self.stack.upstream.problems)
        return f"stdout: {done.stdout[-3000:]}\nstderr: {done.stderr[-3000:]}\nrequests:\n{requests}\n{problems}"

    def row(self) -> dict[str, Any]:
        """What the table says of this test."""
        expected, others = self.refusals
        counted = turns(self.prompts) if self.counted is None else self.counted
        return {
            "client": self.client,
            "version": self.version,
            "requests": len(self.exchanges),
            "expected": len(expected),
            "unexpected": len(others),
            "outside": len(self.outside.asked),
            "turns": len(counted),
            "reusable": sum(turn.reusable for turn in counted),
            "shared": sum(turn.shared for turn in counted),
            "lowest": min((turn.share for turn in counted), default=1.0),
        }

    def check(self) -> None:
        """After each test: what was refused is what the test expects, no other machine was asked, and the script did not fail."""
        assert not self.stack.upstream.problems, self.stack.upstream.problems
        expected, others = self.refusals
        missing = [each for each in self.expected if not any(map(each.fits, expected))]
        assert not missing, f"not refused: {missing}"
        assert set(self.outside.asked) <= self.may_ask, self.outside.asked
        assert not others, "\n".join(["unexpected errors:", *map(str, others), "the server's log:", *self.stack.server.log[-40:]])


@contextlib.contextmanager
def playing(stack: Stack, script: Script, client: str, version: str) -> Iterator[Scene]:
    stack.upstream.begin(script)
    with (
        tempfile.TemporaryDirectory(prefix="home-", ignore_cleanup_errors=True) as folder,
        Recorder(stack.server.url) as recorder,
        Outside() as outside,
    ):
        home, work = Path(folder) / "home", Path(folder) / "work"
        for path in (home / "tmp", work):
            path.mkdir(parents=True)
        yield Scene(client, version, stack, recorder, outside, home, work)
