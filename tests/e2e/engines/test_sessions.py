"""Sessions, as docs/guides/sessions.md tells of them."""

from __future__ import annotations

import functools
from typing import Any
from urllib.parse import quote

import pytest

from chat_model import SPECIAL_IDS
from e2e.engines.asking import chat
from e2e.engines.expected import Biased, Judge
from e2e.engines.setups import Setup
from e2e.harness import Server, wait_until

KEY = {"authorization": "Bearer none"}
streamed_or_whole = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def control(session: str, action: str | None = None) -> dict[str, Any]:
    wish = {"session_id": session, "timeout": 60, **({} if action is None else {"action": action})}
    return {"nvext": {"session_control": wish}}


def open_sessions(server: Server) -> float:
    """Those of the worker. Other tests may have left some: every stored response is a turn of one."""
    return server.metric("penstock_sessions", name="worker-0")


@functools.cache
def only_ascii(judge: Judge) -> Biased:
    """Keeps the model from what is no text by itself: an answer of that could not come back in a transcript as it was."""
    return Biased({token: -100.0 for token, piece in enumerate(judge.pieces) if token in SPECIAL_IDS or not piece.isascii()})


@streamed_or_whole
def test_from_open_to_close(server: Server, judge: Judge, setup: Setup, stream: bool) -> None:
    """The transcript grows, and all but what is new of it is reused, turn by turn; answers keep the tokens that they were made of."""
    name = f"rivers {stream}"
    plain = only_ascii(judge)
    others = open_sessions(server)
    messages: list[dict[str, Any]] = []
    prompt: tuple[int, ...] = ()
    reused: list[int] = []
    computed = 0
    for turn, action in enumerate(("open", None, None, None, "close")):
        question = f"{name}, turn {turn}. " + "tell me of rivers and of their long way to the sea " * 3
        messages.append({"role": "user", "content": question})
        prompt += judge.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
        bias = {str(token): value for token, value in plain.biases.items()}
        answer = chat(server, messages, stream, max_tokens=40, logit_bias=bias, extra_body=control(name, action))
        answer.check([judge.complete(prompt, 40, plain)])
        told = {"id": name, "state": "closed" if action == "close" else "open", "worker": "worker-0", "cached_tokens": answer.cached_tokens}
        assert answer.session is not None
        open_fields = {name: answer.session[name] for name in ("expires_in", "retained_until", "tier")}
        assert answer.session == {**told, **open_fields}
        assert (open_fields["tier"], open_fields["retained_until"] is None) in ((None, True), ("device", False))
        assert open_fields["tier"] is None or action != "close", "what is closed is kept no more"
        reused.append(answer.cached_tokens)
        # Nothing came behind an answer's last token, which for that reason was not computed.
        assert reused[turn] == computed // setup.block_size * setup.block_size
        computed = len(prompt) + len(answer.token_ids[0]) - 1
        messages.append({"role": "assistant", "content": answer.texts[0]})
        prompt += (*answer.token_ids[0], *judge.encode("<|im_end|>\n"))
    assert reused == sorted(set(reused)), "it rises with every turn"
    wait_until(lambda: server.request("GET", f"/v1/sessions/{quote(name)}", headers=KEY)[0] == 404)
    wait_until(lambda: open_sessions(server) <= others)
    late = chat(server, messages, stream, max_tokens=4, extra_body=control(name))
    assert late.session is not None
    assert late.session["state"] == "unknown"


def test_looking_at_a_session(server: Server) -> None:
    others = open_sessions(server)
    messages = [{"role": "user", "content": "tell me of dams " * 12}]
    for _ in range(2):
        answer = chat(server, messages, stream=True, max_tokens=10, extra_body=control("dams", "open"))
        messages += [{"role": "assistant", "content": answer.texts[0]}, {"role": "user", "content": "and on"}]
    status, _, session = server.request("GET", "/v1/sessions/dams", headers=KEY)
    assert status == 200
    assert (session["worker"], session["turns"], session["active_turns"]) == ("worker-0", 2, 0)
    assert session["cached_tokens"] >= answer.cached_tokens > 0
    assert 0 < session["hit_rate"] < 1
    assert 0 < session["expires_in"] <= 60
    assert open_sessions(server) == others + 1
    status, _, gone = server.request("DELETE", "/v1/sessions/dams", headers=KEY)
    assert (status, gone) == (200, {"id": "dams", "object": "session", "deleted": True})
    wait_until(lambda: open_sessions(server) <= others)


def test_two_turns_at_once(server: Server, judge: Judge) -> None:
    """Both run, and both are what they would be alone."""
    chat(server, "first of all", stream=True, max_tokens=4, extra_body=control("both", "open"))
    body = {"model": server.model, "temperature": 0, "max_tokens": 120, "stream": True, "extra_body": control("both")}
    streams = [server.client.chat.completions.create(messages=[{"role": "user", "content": text}], **body) for text in ("left", "right")]  # type: ignore[call-overload]
    iterators = [iter(stream) for stream in streams]
    firsts = [next(iterator).choices[0].delta.content or "" for iterator in iterators]
    texts = [first + "".join(chunk.choices[0].delta.content or "" for chunk in rest) for first, rest in zip(firsts, iterators, strict=True)]
    assert texts == [judge.chat(text, 120).text for text in ("left", "right")]
    assert server.request("DELETE", "/v1/sessions/both", headers=KEY)[0] == 200
