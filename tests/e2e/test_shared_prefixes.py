"""Whether one key learns what another has sent, from `cached_tokens`, from the route, or from anything else in an answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.harness import Server

ALICE, MALLORY = "key-of-alice", "key-of-mallory"
KEYS = {"PENSTOCK_API_KEY": f"{ALICE},{MALLORY}"}
BLOCK = 16


def prompt_of(number: int) -> list[int]:
    """Six full blocks and a bit, other ones for every number."""
    return [number, *range(500, 500 + 6 * BLOCK)]


SECRETS = [prompt_of(number) for number in range(50)]
"""The prompts of Alice."""
WRONG = [prompt_of(number) for number in range(100, 150)]

Asked = tuple[int, dict[str, str], Any]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    yield from served("--workers", "2", environment=KEYS)


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    yield from served("--share-prefixes", environment=KEYS)


@pytest.fixture(scope="module")
def without_keys() -> Iterator[Server]:
    yield from served()


def served(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Server]:
    server = Server("--step-ms", "1", *arguments, environment=environment).wait_ready()
    yield server
    assert server.stop() == 0


def ask(server: Server, key: str, path: str, **fields: object) -> Asked:
    body = json.dumps({"model": "simulator", **fields}).encode()
    status, headers, answer = server.request("POST", path, body, {"authorization": f"Bearer {key}"})
    return status, dict(headers.items()), answer


def complete(server: Server, key: str, prompt: object, **fields: object) -> Any:
    status, _, answer = ask(server, key, "/v1/completions", prompt=prompt, max_tokens=1, **fields)
    assert status == 200, answer
    return answer


def cached(server: Server, key: str, prompt: object, **fields: object) -> int:
    return int(complete(server, key, prompt, **fields)["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_right_guesses_look_like_wrong_ones(guarded: Server) -> None:
    """Everything that an answer shows, except its text and its ids, has the same distribution."""
    for secret in SECRETS:
        assert cached(guarded, ALICE, secret) == 0
    seen: dict[str, Counter[str]] = {"right": Counter(), "wrong": Counter()}
    for right, wrong in zip(SECRETS, WRONG, strict=True):
        for kind, guess in (("right", right), ("wrong", wrong)):
            _, headers, answer = ask(guarded, MALLORY, "/v1/completions", prompt=guess, max_tokens=1, nvext={"extra_fields": ["route"]})
            (route,) = answer["nvext"]["route"]
            assert route.pop("worker") in ("worker-0", "worker-1")
            assert route == {"choice": 0, "reason": "least_loaded", "diverted": None, "overlap_blocks": 0}
            told = {"usage": answer["usage"], "headers": sorted(headers), "fields": sorted(answer)}
            seen[kind][json.dumps(told)] += 1
    assert seen["right"] == seen["wrong"]
    assert len(seen["right"]) == 1, "every answer looks the same"
    assert '"cached_tokens": 0' in next(iter(seen["right"]))
    assert [cached(guarded, ALICE, secret) for secret in SECRETS[:5]] == [6 * BLOCK] * 5, "Alice finds her own"


def said(where: str) -> str:
    return f"{where}: a long text that only one of them knows " * 12


MARK = {"cache_control": {"type": "ephemeral"}}
BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": said("completions"), "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": said("chat")}], "max_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": said("messages")}], "max_tokens": 1, **MARK},
    "/v1/responses": {"input": said("responses"), "max_output_tokens": 1, "store": False},
}


def cached_by(answer: Any) -> int:
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return int(usage["cache_read_input_tokens"] if details is None else details["cached_tokens"])


@pytest.mark.parametrize("path", BODIES)
def test_no_endpoint_tells(guarded: Server, path: str) -> None:
    found = []
    for key in (ALICE, ALICE, MALLORY, MALLORY):
        status, _, answer = ask(guarded, key, path, **BODIES[path])
        assert status == 200, answer
        found.append(cached_by(answer))
    assert found[1] == found[3] > 64
    # Templates begin in the same way: at most that much she has sent herself, to another endpoint.
    assert found[2] <= BLOCK


@pytest.mark.parametrize("path", BODIES)
def test_a_salt_sets_prompts_apart(guarded: Server, path: str) -> None:
    salts: list[dict[str, object]] = [
        {"cache_salt": f"one {path}"},
        {"nvext": {"cache_salt": f"one {path}"}},
        {"cache_salt": f"other {path}"},
    ]
    found = []
    for key, salt in ((ALICE, salts[0]), (ALICE, salts[1]), (ALICE, salts[2]), (MALLORY, salts[0]), (MALLORY, salts[0])):
        status, _, answer = ask(guarded, key, path, **BODIES[path], **salt)
        assert status == 200, answer
        found.append(cached_by(answer))
    assert found[0] == found[2] == found[3] == 0
    assert found[1] == found[4] > 64


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("salt", ["", "x" * 129, 5, ["s"]])
def test_a_bad_salt_gets_400(guarded: Server, path: str, salt: object) -> None:
    for fields, param in (({"cache_salt": salt}, "cache_salt"), ({"nvext": {"cache_salt": salt}}, "nvext.cache_salt")):
        status, _, answer = ask(guarded, ALICE, path, **BODIES[path], **fields)
        assert status == 400, answer
        message = answer["error"]["message"]
        assert f"`{param}` {'has 129 characters' if salt == 'x' * 129 else f'is {json.dumps(salt)}'}: expected " in message


def test_keys_share_if_the_operator_says_so(shared: Server) -> None:
    prompt = SECRETS[0]
    assert [cached(shared, key, prompt) for key in (ALICE, MALLORY)] == [0, 6 * BLOCK]
    # A salt still sets apart, and equal salts meet.
    assert [cached(shared, key, prompt, cache_salt="a") for key in (ALICE, MALLORY)] == [0, 6 * BLOCK]
    assert cached(shared, MALLORY, prompt, cache_salt="b") == 0
    (route,) = complete(shared, MALLORY, prompt, nvext={"extra_fields": ["route"]})["nvext"]["route"]
    assert route["cost"] >= 0, "who shares prefixes may see the load"


def test_without_keys_prefixes_are_shared(without_keys: Server) -> None:
    assert [cached(without_keys, key, SECRETS[0]) for key in ("", "any", "other")] == [0, 6 * BLOCK, 6 * BLOCK]
    assert [cached(without_keys, "", SECRETS[0], cache_salt="a") for _ in range(2)] == [0, 6 * BLOCK]


def test_a_session_of_one_tenant_shares_nothing_with_another(guarded: Server) -> None:
    def turn(key: str, prompt: list[int], **fields: object) -> tuple[int, Any]:
        nvext = {"session_control": {"session_id": "the same", "action": "open"}, **fields}
        answer = complete(guarded, key, prompt, nvext=nvext)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["nvext"]["session"]

    prompt = prompt_of(200)
    assert turn(ALICE, prompt)[0] == 0
    assert turn(ALICE, prompt)[0] == 6 * BLOCK
    found, session = turn(MALLORY, prompt)
    assert (found, session["cached_tokens"], session["state"]) == (0, 0, "open")


def test_choices_of_one_prompt_share_it(guarded: Server) -> None:
    prompt = prompt_of(201)
    complete(guarded, MALLORY, prompt, n=4)
    assert cached(guarded, MALLORY, prompt, n=4) == 6 * BLOCK
