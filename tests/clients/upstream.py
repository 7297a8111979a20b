"""A scripted engine: a server with OpenAI's completions on loopback. It answers from a script and keeps every prompt that it gets."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.text.tokenizers.tokenizer import Tokenizer

# How many tokens one event has.
EVENT_TOKENS = 16


@dataclass
class Prompt:
    """A prompt as the engine got it, and what it answered. `text` shows special tokens, too. `body` has everything that was asked for:
    a grammar is in `structured_outputs`."""

    token_ids: list[int]
    text: str
    body: dict[str, Any]
    answer: str = ""
    answer_ids: list[int] = field(default_factory=list)

    @property
    def known_ids(self) -> list[int]:
        """What an engine has in its cache after this turn. The last token ends the answer."""
        return [*self.token_ids, *self.answer_ids[:-1]]


Script = Callable[[Prompt], str]
"""From a prompt to the text that the model writes, in the model's own format. It may block. It runs in a thread for each request."""


class Refused(Exception):
    """Raised by a script: the engine answers with this status instead."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def tool_call(name: str, /, **arguments: Any) -> str:
    """A call as the test model writes it (Hermes). Several calls are joined."""
    return f'\n<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class InTurn:
    """A script that gives these answers one after the other. Each is a text or a script of its own. One request too many fails the test."""

    def __init__(self, *answers: str | Script) -> None:
        self._answers = list(answers)
        self._lock = threading.Lock()

    def __call__(self, prompt: Prompt) -> str:
        with self._lock:
            assert self._answers, f"the script is over, but there is one more prompt, which ends: {prompt.text[-500:]}"
            answer = self._answers.pop(0)
        return answer if isinstance(answer, str) else answer(prompt)


class Upstream:
    """The server, and the script that is played now. `prompts` are in the order in which they came."""

    def __init__(self, tokenizer: Tokenizer, context_length: int) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.prompts: list[Prompt] = []
        self.problems: list[str] = []
        """What a script raised that it should not have."""
        self._script: Script = InTurn()
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def begin(self, script: Script) -> None:
        """Forgets the earlier prompts and plays this script."""
        self.prompts, self.problems, self._script = [], [], script

    def answer(self, body: dict[str, Any]) -> tuple[list[int], str]:
        """The tokens of the answer and why it ends. Raises Refused."""
        if not isinstance(body.get("cache_salt", ""), str):
            raise Refused(400, "cache_salt is a text")
        token_ids = list(body["prompt"])
        if token_ids == [0]:
            # Penstock finds out what the server can do.
            return [self.tokenizer.end_id], "stop"
        shown = self.tokenizer.detokenizer(skip_special_tokens=False)
        prompt = Prompt(token_ids, shown.feed(token_ids) + shown.finish(), body)
        self.prompts.append(prompt)
        try:
            prompt.answer = self._script(prompt)
        except Refused:
            raise
        except BaseException as error:
            self.problems.append(f"{type(error).__name__}: {error}")
            raise Refused(400, f"the script failed: {error}") from error
        made = [*self.tokenizer.encode(prompt.answer), self.tokenizer.end_id]
        prompt.answer_ids = made[: body["max_tokens"]]
        return prompt.answer_ids, "stop" if len(made) <= body["max_tokens"] else "length"


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            model = {"id": "scripted", "owned_by": "scripted", "max_model_len": self.server.upstream.context_length}
            self._answer(200, {"object": "list", "data": [model]})
        else:
            self._answer(404, {"error": {"message": f"no {self.path} here"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions":
            self._answer(404, {"error": {"message": f"no {self.path} here"}})
            return
        try:
            token_ids, finish = self.server.upstream.answer(body)
        except Refused as refused:
            self._answer(refused.status, {"error": {"message": str(refused)}})
            return
        if body.get("stream"):
            self._stream(token_ids, finish)
        else:
            self._answer(200, {"choices": [_choice(token_ids, finish)]})

    def _stream(self, token_ids: Sequence[int], finish: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        try:
            for begin in range(0, len(token_ids), EVENT_TOKENS):
                end = begin + EVENT_TOKENS
                choice = _choice(token_ids[begin:end], finish if end >= len(token_ids) else None)
                self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
        except ConnectionError:
            # The request was cancelled.
            self.close_connection = True

    def _answer(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def _choice(token_ids: Sequence[int], finish: str | None) -> dict[str, Any]:
    return {"index": 0, "text": "", "token_ids": list(token_ids), "finish_reason": finish}
