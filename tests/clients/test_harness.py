"""The harness itself: what a client must not do is seen."""

from __future__ import annotations

import sys

from clients.conftest import Play
from clients.weather import weather

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
    assert scene.prompts[0].answer == "You are welcome."
