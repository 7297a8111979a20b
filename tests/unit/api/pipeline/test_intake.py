"""Before admission nothing is expensive: limits are checked in the order size, key, rate, shape, tokens, on every route with a body."""

from __future__ import annotations

import re

import pytest

from front_end import FrontEnd, request, says
from penstock.api.app import ROUTES
from penstock.api.auth.gate import Gate
from penstock.api.auth.keys import Keyring
from penstock.api.auth.quota import Quota
from penstock.api.openai.completions import parse_completion
from penstock.config.front_end import KeySettings, Limits, QuotaLimits, read_key
from penstock.wire.errors import RequestError

KEY = "psk-test"
BEARER = {"authorization": f"Bearer {KEY}"}
WITH_BODY = [re.sub(r"{.*?}", "x", route.path) for route in ROUTES if route.body is not None]
GENERATING = ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"]
TOO_LARGE = {"content-length": str(Limits().max_body_bytes + 1)}
NO_JSON = b"this is not JSON"


def limited(**limits: int) -> tuple[FrontEnd, Quota]:
    """A front end that knows one key, and what that may use."""
    front_end = FrontEnd(says("x"))
    keyring = Keyring(KeySettings(given=(read_key(KEY),), defaults=QuotaLimits(**limits)), front_end.tally)
    front_end.app = Gate(front_end.application, keyring, front_end.tally)
    tenant = keyring.tenant_of(KEY.encode())
    assert tenant is not None
    return front_end, tenant.quota


def test_the_table_has_the_routes_that_decode_and_tokenize() -> None:
    assert {*GENERATING, "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"} <= set(WITH_BODY)


@pytest.mark.parametrize("path", WITH_BODY)
async def test_the_order_of_limits(path: str) -> None:
    front_end, _ = limited(requests_per_minute=1)
    await front_end.send("POST", path, NO_JSON, TOO_LARGE)
    assert front_end.status == 413, "size before key"
    await front_end.send("POST", path, NO_JSON, {**TOO_LARGE, **BEARER})
    assert front_end.status == 413
    await front_end.send("POST", path, NO_JSON)
    assert front_end.status == 401, "key before rate"
    await front_end.send("POST", path, NO_JSON, BEARER)
    assert front_end.status not in (401, 413, 429), "nothing of the above has cost a request"
    await front_end.send("POST", path, NO_JSON, BEARER)
    assert front_end.status == 429, "rate before what is in the body"
    assert front_end.tally.limits_reached == {("max_body_bytes",): 2, ("requests_per_minute",): 1}
    assert front_end.tally.quota_refusals == {("api-key-1", "requests_per_minute"): 1}


@pytest.mark.parametrize("path", GENERATING)
async def test_a_body_is_not_decoded_when_no_generation_may_run_or_no_token_is_left(path: str) -> None:
    front_end, quota = limited(concurrency=1, tokens_per_minute=10)
    quota.admit(1, 10)
    await front_end.send("POST", path, NO_JSON, BEARER)
    assert (front_end.status, "tokens_per_minute" in front_end.body.decode()) == (429, True)
    front_end, quota = limited(concurrency=1)
    quota.admit(1, 10)
    await front_end.send("POST", path, NO_JSON, BEARER)
    assert (front_end.status, "concurrency" in front_end.body.decode()) == (429, True)
    await front_end.send("POST", "/tokenize", NO_JSON, BEARER)
    assert front_end.status == 400, "it needs no generation"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": [""] * 2049}, "prompt", "`prompt` has 2,049 prompts: expected at most 2,048"),
        ({"prompt": [[]] * 2049}, "prompt", "`prompt` has 2,049 prompts: expected at most 2,048"),
        ({"prompt": [""] * 100, "n": 128}, "n", "100 prompts × `n` 128 make more than 2048 choices"),
        ({"prompt": [""] * 100, "best_of": 128}, "n", "100 prompts × `n` 128 make more than 2048 choices"),
        ({"prompt": [-1] * 1000}, "prompt", "`prompt` has 1,000 tokens; that does not fit the model's context of 1,000 tokens"),
        ({"prompt": [[1], [-1] * 1000]}, "prompt[1]", "`prompt[1]` has 1,000 tokens; that does not fit"),
        ({"prompt": "", "max_tokens": 0}, "max_tokens", "`max_tokens` is 0"),
    ],
)
async def test_the_shape_is_checked_before_anything_is_tokenized(fields: dict[str, object], param: str, says: str) -> None:
    """Each of these has a prompt that is wrong, too, which is found when it is tokenized or looked at."""
    incoming, context = await request({"model": "m", **fields})
    with pytest.raises(RequestError) as caught:
        await parse_completion(incoming, context)
    assert caught.value.param == param
    assert says in caught.value.message


async def test_a_refused_body_is_taken_from_the_client_and_dropped() -> None:
    front_end, quota = limited(requests_per_minute=1)
    quota.charge()
    left = 3
    sent = []

    async def receive() -> object:
        nonlocal left
        left -= 1
        return {"type": "http.request", "body": b"x" * 1000, "more_body": left > 0}

    async def send(message: object) -> None:
        sent.append((left, message))

    headers = [(b"authorization", f"Bearer {KEY}".encode())]
    scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "headers": headers}
    await front_end.app(scope, receive, send)  # type: ignore[arg-type]
    assert [remaining for remaining, _ in sent] == [0, 0], "some clients read no answer before they have sent everything"
