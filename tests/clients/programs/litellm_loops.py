"""litellm: append loops over chat and over Anthropic's API, streamed and not, and structured output."""

import json
import os
from typing import Any

import litellm
from pydantic import BaseModel

CHAT = {"model": f"openai/{os.environ['MODEL']}", "api_base": os.environ["OPENAI_BASE_URL"]}
MESSAGES = {"model": f"anthropic/{os.environ['MODEL']}", "api_base": os.environ["ANTHROPIC_BASE_URL"], "max_tokens": 500}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
SYSTEM = {"role": "system", "content": "You are a guide."}
QUESTION = {"role": "user", "content": "How is the weather in Rome and in Oslo?"}
THANKS = {"role": "user", "content": "Thank you."}


class City(BaseModel):
    city: str
    sunny: bool


def whole(target: Any, messages: list[Any]) -> Any:
    return litellm.completion(**target, messages=messages, tools=TOOLS)


def streamed(target: Any, messages: list[Any]) -> Any:
    chunks = list(litellm.completion(**target, messages=messages, tools=TOOLS, stream=True))
    return litellm.stream_chunk_builder(chunks, messages=messages)


def loop(ask: Any, target: Any) -> None:
    messages: list[Any] = [SYSTEM, QUESTION]
    while True:
        message = ask(target, messages).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: sunny"})
    messages.append(THANKS)
    print(ask(target, messages).choices[0].message.content)


def marked(target: Any) -> None:
    """litellm marks messages for the cache, at the message itself where the content is a text."""
    points = [{"location": "message", "role": "system"}, {"location": "message", "index": -1}]
    messages = [SYSTEM, QUESTION, {"role": "assistant", "content": "It is sunny."}, THANKS]
    print(litellm.completion(**target, messages=messages, cache_control_injection_points=points).choices[0].message.content)


def structured(target: Any) -> None:
    messages = [SYSTEM, {"role": "user", "content": "Rome, as JSON."}]
    answer = litellm.completion(**target, messages=messages, response_format=City)
    assert City.model_validate_json(answer.choices[0].message.content) == City(city="Rome", sunny=True)
    print("structured")


litellm.suppress_debug_info = True
litellm.num_retries = 0
for target in (CHAT, MESSAGES):
    for ask in (whole, streamed):
        loop(ask, target)
    marked(target)
structured(CHAT)
