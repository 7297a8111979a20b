"""Bad requests: the same status, code, field and words from every engine, and none is hurt by them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from chat_model import VOCABULARY
from e2e.engines.asking import chat, complete
from e2e.engines.expected import Judge
from e2e.engines.setups import CONTEXT_LENGTH, MODEL
from e2e.harness import Server
from penstock.wire.errors import context_exceeded

LAST = VOCABULARY - 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("fields", "status", "code", "param", "message"),
    [
        ({"model": "gpt-9"}, 404, "model_not_found", "model", f"`model` is 'gpt-9': this server has `{MODEL}`"),
        (
            {"prompt": [5] * (CONTEXT_LENGTH + 1)},
            400,
            "context_length_exceeded",
            "prompt",
            context_exceeded(2048, "prompt", 2049),
        ),
        (
            {"prompt": [5] * (CONTEXT_LENGTH - 7), "max_tokens": 8},
            400,
            "context_length_exceeded",
            "prompt",
            context_exceeded(2048, "prompt", 2041, 8),
        ),
        ({"prompt": [1, LAST + 1]}, 400, "invalid_value", "prompt[1]", f"`prompt[1]` is {LAST + 1}: expected a token id from 0 to {LAST}"),
        ({"prompt": [[5], [6, -1]]}, 400, "invalid_value", "prompt[1][1]", f"`prompt[1][1]` is -1: expected a token id from 0 to {LAST}"),
        ({"prompt": ""}, 400, "empty_prompt", "prompt", "`prompt` has no tokens; a prompt needs at least one"),
        (
            {"extra_body": {"stop_token_ids": [LAST + 1]}},
            400,
            "invalid_value",
            "stop_token_ids[0]",
            f"`stop_token_ids[0]` is {LAST + 1}: expected a token id from 0 to {LAST}",
        ),
        (
            {"logit_bias": {str(LAST + 1): 1}},
            400,
            "invalid_value",
            f"logit_bias.{LAST + 1}",
            f"`logit_bias.{LAST + 1}`: expected a token id from 0 to {LAST}",
        ),
        ({"temperature": 9}, 400, "invalid_value", "temperature", "`temperature` is 9: expected `float` <= 2.0"),
        ({"extra_body": {"temprature": 1}}, 400, "unknown_field", "temprature", "unknown field `temprature`"),
    ],
    ids=["model", "prompt", "max_tokens", "token id", "negative id", "empty", "stop id", "bias", "temperature", "unknown"],
)
def test_a_bad_completion(
    server: Server, judge: Judge, fields: dict[str, Any], status: int, code: str, param: str, message: str, stream: bool
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        complete(server, **{"prompt": "x", **fields}, stream=stream)
    error = caught.value
    assert (error.status_code, error.code, error.param) == (status, code, param)
    assert isinstance(error.body, dict)
    assert error.body["message"] == message
    complete(server, "once", stream, max_tokens=16).check([judge.complete("once", 16)])


def test_an_overlong_chat(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(server, "a word " * CONTEXT_LENGTH, stream=True)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_what_is_refused_does_not_disturb_what_runs(server: Server, judge: Judge) -> None:
    """Bad ids are known to end a whole server of one engine: here a stream goes on beside them."""
    expected = judge.complete("The river runs", 150)
    stream = iter(server.client.completions.create(model=MODEL, prompt="The river runs", max_tokens=150, temperature=0, stream=True))
    text = next(stream).choices[0].text
    for bad in ([LAST + 1], [2**31], [5] * (CONTEXT_LENGTH + 1)):
        with pytest.raises(openai.BadRequestError):
            server.client.completions.create(model=MODEL, prompt=bad, max_tokens=4)
    assert text + "".join(chunk.choices[0].text for chunk in stream) == expected.text
