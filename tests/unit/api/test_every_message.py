"""All text of a request reaches the model, over every API; what a chat template cannot render is refused with the request's own field."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from chat_templates import DROPPING, PLAIN, REFUSING
from front_end import FrontEnd, says
from penstock.stream.mailbox import Mailbox
from penstock.text.tokenizers.source import TokenizerSource, fingerprint
from penstock.wire.messages import ModelInfo, Submit
from tokenizer_kinds import byte_level

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


async def ask(template: str, path: str, **fields: Any) -> tuple[str, int, Any]:
    """The prompt that the model got, the status, and the answer."""
    library = byte_level(["</s>"])
    data = msgspec.msgpack.encode(TokenizerSource(library.to_str(), {"eos_token": "</s>"}, {"default": template}))
    model = ModelInfo("m", "by hand", fingerprint(data), library.get_vocab_size(), 10_000, 16)
    prompts: list[str] = []

    async def produce(submit: Submit, mailbox: Mailbox) -> None:
        prompts.append(library.decode(list(submit.token_ids)))
        await says("x")(submit, mailbox)

    async def fetch() -> bytes:
        return data

    front_end = FrontEnd(produce)
    front_end.models.live = [model]
    await front_end.models.prepare(model, fetch)
    needed = {"max_tokens": 8} if path == MESSAGES else {"store": False} if path == RESPONSES else {}
    await front_end.send("POST", path, json.dumps({"model": "m", **needed, **fields}).encode())
    return "".join(prompts), front_end.status, front_end.json


def say(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


CONVERSATION = [
    say("developer", "first wish"),
    say("user", "asks"),
    say("assistant", "says"),
    say("developer", "later wish"),
    say("user", "more"),
]


@pytest.mark.parametrize("template", [PLAIN, *DROPPING.values(), *REFUSING.values()], ids=["plain", *DROPPING, *REFUSING])
async def test_instructions_reach_the_model_over_every_api(template: str) -> None:
    chat, status, _ = await ask(template, CHAT, messages=[say("system", "rules"), *CONVERSATION])
    assert status == 200
    response, status, _ = await ask(template, RESPONSES, instructions="rules", input=CONVERSATION)
    assert status == 200
    assert response == chat
    told = [{**message, "role": message["role"].replace("developer", "system")} for message in CONVERSATION]
    message, status, _ = await ask(template, MESSAGES, system="rules", messages=told)
    assert status == 200
    for prompt in (chat, message):
        places = [prompt.index(text) for text in ("rules", "first wish", "asks", "says", "later wish", "more")]
        assert places == sorted(places)
        assert "developer" not in prompt


async def test_what_the_template_refuses_is_named_as_the_request_names_it() -> None:
    template = "{% for m in messages %}{% if 'say it' in m.content %}{{ raise_exception('Never!') }}{% endif %}{{ m.content }}{% endfor %}"
    wrong = say("user", "say it")
    for path, field, body in (
        (CHAT, "messages[2]", {"messages": [say("developer", "rules"), say("assistant", "hm"), wrong]}),
        (RESPONSES, "input[1]", {"instructions": "rules", "input": [say("assistant", "hm"), wrong]}),
        (MESSAGES, "messages[1]", {"system": "rules", "messages": [say("assistant", "hm"), wrong]}),
    ):
        _, status, answer = await ask(template, path, **body)
        assert status == 400
        assert answer["error"]["message"] == f"`{field}`: the model's chat template refuses this user message: Never!"
        if path != MESSAGES:
            assert (answer["error"]["param"], answer["error"]["code"]) == (field, "unsupported_message")


async def test_what_the_template_leaves_out_is_refused_when_tokens_are_counted_too() -> None:
    template = "{% for m in messages[:7] %}{{ m.content }}{% endfor %}"
    long = [say(role, f"{role} {turn}") for turn in range(4) for role in ("user", "assistant")]
    for path in (f"{MESSAGES}/count_tokens", "/tokenize"):
        _, status, answer = await ask(template, path, messages=[*long, say("user", "end")])
        assert status == 400
        assert answer["error"]["message"] == "`messages[7]`: the model's chat template leaves out text of this assistant message"
