"""What each API says of a prompt that does not fit: clients look for these words, and then shorten what they send."""

from __future__ import annotations

import re

import msgspec
import pytest

from penstock.api.anthropic.errors import AnthropicErrors, fault_content
from penstock.api.errors import OpenAIErrors, fault_body
from penstock.backends.http.dialects import refused
from penstock.wire.errors import RequestError, context_exceeded
from penstock.wire.messages import Fault, Submit
from penstock.worker.backend import validate_submit

# From the source of each client, as of 2026.
OPENAI_WORDS = {
    "litellm": "(?i)this model's maximum context length is",
    "langchain": "exceeds the context window",
    "OpenCode": r"(?i)maximum context length is \d+ tokens",
    "OpenCode, too": "(?i)reduce the length of the messages",
    "Claude Code": "maximum context length",
}
ANTHROPIC_WORDS = {
    "Claude Code": r"^prompt is too long: \d+ tokens > \d+ maximum$",
    "Claude Code, how many": r"(?i)prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)",
    "litellm, langchain, OpenCode": "prompt is too long",
}

PROMPT = context_exceeded(20_000, "messages", 20_829)
AT_LEAST = context_exceeded(20_000, "messages", 20_829, is_cut=True)
WITH_ANSWER = context_exceeded(20_000, "messages", 19_829, 1000)


@pytest.mark.parametrize("message", [PROMPT, AT_LEAST, WITH_ANSWER], ids=["prompt", "at least", "with the answer"])
def test_both_apis_say_it_in_the_words_that_clients_parse(message: str) -> None:
    error = RequestError(message, param="messages", code="context_length_exceeded")
    fault = Fault("context_length_exceeded", message)
    for client, words in OPENAI_WORDS.items():
        for body in (OpenAIErrors().render(error)[1], fault_body(fault)):
            said = msgspec.json.decode(body)["error"]
            assert re.search(words, said["message"]), client
            assert said["code"] == "context_length_exceeded", "langchain and Codex look for the code"
    for client, words in ANTHROPIC_WORDS.items():
        for content in (msgspec.json.decode(AnthropicErrors().render(error)[1])["error"], fault_content(fault, None)):
            assert re.search(words, content["message"]), client
            assert content == {"type": "invalid_request_error", "message": "prompt is too long: 20829 tokens > 20000 maximum"}


def test_the_numbers_have_no_commas() -> None:
    assert PROMPT == (
        "This model's maximum context length is 20000 tokens. However, your messages resulted in 20829 tokens, which exceeds the context "
        "window. Please reduce the length of the messages."
    )
    assert "you requested 20829 tokens (19829 in the messages, 1000 in the completion)" in WITH_ANSWER


def test_a_prompt_that_fills_the_context_is_too_long_by_one() -> None:
    """Claude Code leaves out the difference of the numbers, and nothing if there is none."""
    fault = Fault("context_length_exceeded", context_exceeded(20_000, "messages", 20_000))
    assert fault_content(fault, None)["message"] == "prompt is too long: 20000 tokens > 19999 maximum"


def test_a_worker_says_it_in_the_same_words() -> None:
    fault = validate_submit(Submit(bytes(16), (5,) * 90, 20, seed=1), 10, 100)
    assert fault is not None
    assert fault_content(fault, None)["message"] == "prompt is too long: 110 tokens > 100 maximum"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            "This model's maximum context length is 100 tokens. However, you requested 110 tokens (90 in the prompt, 20 …).",
            "prompt is too long: 110 tokens > 100 maximum",
        ),
        (
            "This model's maximum context length is 100 tokens. However, your request has 110 input tokens.",
            "prompt is too long: 110 tokens > 100 maximum",
        ),
        ("The input (110 tokens) is longer than the model's context length (100 tokens).", "prompt is too long: the engine answered 400: "),
        ("The decoder prompt (length 110) is longer than the maximum model length of 99.", "prompt is too long: the engine answered 400: "),
        ("the request exceeds the available context size (100 tokens), try increasing it", "prompt is too long: the engine answered 400: "),
    ],
    ids=["vLLM", "vLLM, newer", "SGLang", "vLLM, by tokens", "llama.cpp"],
)
def test_a_server_behind_http_refuses_for_the_same_reason(message: str, says: str) -> None:
    fault = refused(message, 400).fault
    assert fault.code == "context_length_exceeded"
    assert fault_content(fault, None)["message"].startswith(says)
    assert refused("temperature must be at most 2", 400).fault.code == "engine_refused"
