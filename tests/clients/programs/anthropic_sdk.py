"""Anthropic's own client: each answer's blocks go back as they came, and the tools' results behind them."""

import os
from typing import Any

from anthropic import Anthropic
from pydantic import BaseModel

CLIENT = Anthropic(max_retries=0)
MODEL = os.environ["MODEL"]
SYSTEM = "You are a guide."
QUESTION: Any = {"role": "user", "content": "How is the weather in Rome and in Oslo?"}
THANKS: Any = {"role": "user", "content": "Thank you."}
TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class City(BaseModel):
    city: str
    sunny: bool


def loop(ask: Any) -> None:
    messages: list[Any] = [QUESTION]
    while True:
        answer = ask(messages)
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason != "tool_use":
            break
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": f"{call.input['city']}: sunny"} for call in calls]
        messages.append({"role": "user", "content": results})
    messages.append(THANKS)
    print(ask(messages).content[0].text)


def whole(messages: list[Any]) -> Any:
    return CLIENT.messages.create(model=MODEL, max_tokens=500, system=SYSTEM, messages=messages, tools=[TOOL])


def streamed(messages: list[Any]) -> Any:
    with CLIENT.messages.stream(model=MODEL, max_tokens=500, system=SYSTEM, messages=messages, tools=[TOOL]) as stream:
        return stream.get_final_message()


def structured() -> None:
    """Its text blocks have `parsed_output`."""
    messages: list[Any] = [{"role": "user", "content": "Rome, as JSON."}]
    answer = CLIENT.messages.parse(model=MODEL, max_tokens=500, system=SYSTEM, messages=messages, output_format=City)
    assert answer.parsed_output == City(city="Rome", sunny=True)
    messages += [{"role": "assistant", "content": answer.content}, THANKS]
    last: Any = CLIENT.messages.create(model=MODEL, max_tokens=500, system=SYSTEM, messages=messages)
    print(last.content[0].text)


loop(whole)
loop(streamed)
structured()
