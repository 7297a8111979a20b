"""The harness itself: what a client must not do is seen."""

from __future__ import annotations

import sys
import time

import pytest

from clients.conftest import Play
from clients.upstream import Prompt, Refused
from clients.weather import WELCOME, weather

PROGRAM = """
import json, os, urllib.error, urllib.request
def post(path, **body):
    data = json.dumps({"model": os.environ["MODEL"], **body}).encode()
    request = urllib.request.Request(os.environ["PENSTOCK_URL"] + path, data, {"content-type": "application/json"})
    try:
        return urllib.request.urlopen(request).read()
    except urllib.error.HTTPError as error:
        return error.read()
post("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}])
post("/v1/chat/completions", messages=[{"role": "user", "content": "Hello", "mood": "good"}])
try:
    urllib.request.urlopen("http://telemetry.example/")
except urllib.error.HTTPError as error:
    print(error.code, os.environ["HOME"], os.environ["OPENAI_API_KEY"], os.getcwd())
"""


def test_what_was_not_expected_is_found(play: Play) -> None:
    scene = play("the harness", "-", weather)
    done = scene.run(sys.executable, "-c", PROGRAM)
    assert done.stdout.split() == ["403", str(scene.home), "sk-made-up-0123456789abcdef", str(scene.work)]
    assert scene.outside.asked == ["GET http://telemetry.example/"]
    assert [one.status for one in scene.exchanges] == [200, 400]
    assert [len(some) for some in scene.refusals] == [0, 1]
    scene.expect(status=400, path="/v1/chat/completions", text="some other error")
    assert [len(some) for some in scene.refusals] == [0, 1]
    scene.expect(status=400, path="/v1/chat/completions", text="unknown field `messages[0].mood`")
    assert [len(some) for some in scene.refusals] == [1, 0]
    assert scene.prompts[0].answer == WELCOME
    with pytest.raises(AssertionError, match=r"not refused.*some other error"):
        scene.check()
    scene.expected.pop(0)
    with pytest.raises(AssertionError, match="telemetry"):
        scene.check()
    scene.may_ask = {"GET http://telemetry.example/"}


STREAM = """
import json, os, urllib.request
messages = [{"role": "user", "content": "Hello"}]
body = json.dumps({"model": os.environ["MODEL"], "max_tokens": 9, "stream": True, "messages": messages}).encode()
for path in ("/v1/chat/completions", "/v1/messages"):
    request = urllib.request.Request(os.environ["PENSTOCK_URL"] + path, body, {"content-type": "application/json"})
    urllib.request.urlopen(request).read()
"""


def test_an_error_in_a_stream_is_a_refusal(play: Play) -> None:
    def late(_: Prompt) -> str:
        time.sleep(2.5)
        raise Refused(400, "not today")

    scene = play("the harness", "-", late)
    scene.run(sys.executable, "-c", STREAM)
    assert [one.status for one in scene.exchanges] == [200, 200]
    assert [len(some) for some in scene.refusals] == [0, 2]
    scene.expect(status=200, path="/v1/chat/completions", text="not today")
    assert [len(some) for some in scene.refusals] == [1, 1]
    scene.expect(status=200, path="/v1/messages", text="not today")
