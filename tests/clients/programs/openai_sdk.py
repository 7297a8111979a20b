"""OpenAI's own client: in each loop an answer goes back as it came (`messages.append(message)`), and the tools' results behind it."""

import json
import os
from typing import Any

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

CLIENT = OpenAI(max_retries=0)
MODEL = os.environ["MODEL"]
SYSTEM = {"role": "system", "content": "You are a guide."}
QUESTION = {"role": "user", "content": "How is the weather in Rome and in Oslo?"}
THANKS = {"role": "user", "content": "Thank you."}


class weather(BaseModel):  # noqa: N801, its name is the tool's
    """The weather of a city."""

    city: str


class City(BaseModel):
    city: str
    sunny: bool


def chat(ask: Any) -> None:
    messages: list[Any] = [SYSTEM, QUESTION]
    while True:
        message = ask(messages)
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: sunny"})
    messages.append(THANKS)
    print(ask(messages).content)


def whole(messages: list[Any]) -> Any:
    tools: Any = [pydantic_function_tool(weather)]
    return CLIENT.chat.completions.create(model=MODEL, messages=messages, tools=tools).choices[0].message


def parsed(messages: list[Any]) -> Any:
    """Its messages have `parsed`, and its calls `parsed_arguments`."""
    return CLIENT.chat.completions.parse(model=MODEL, messages=messages, tools=[pydantic_function_tool(weather)]).choices[0].message


def streamed(messages: list[Any]) -> Any:
    with CLIENT.chat.completions.stream(model=MODEL, messages=messages, tools=[pydantic_function_tool(weather)]) as stream:
        return stream.get_final_completion().choices[0].message


def structured() -> None:
    messages: list[Any] = [SYSTEM, {"role": "user", "content": "Rome, as JSON."}]
    message = CLIENT.chat.completions.parse(model=MODEL, messages=messages, response_format=City).choices[0].message
    assert message.parsed == City(city="Rome", sunny=True)
    messages += [message, THANKS]
    print(CLIENT.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content)


def responses(ask: Any) -> None:
    items: list[Any] = [QUESTION]
    while True:
        output = ask(items).output
        items += output
        calls = [item for item in output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            city = json.loads(call.arguments)["city"]
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": f"{city}: sunny"})
    items.append(THANKS)
    print(ask(items).output_text)


TOOL: Any = {"type": "function", "name": "weather", "parameters": weather.model_json_schema(), "strict": False}


def response(items: list[Any]) -> Any:
    return CLIENT.responses.create(model=MODEL, instructions="You are a guide.", input=items, tools=[TOOL], store=False)


def parsed_response(items: list[Any]) -> Any:
    """Its parts have `parsed`, and its calls `parsed_arguments`."""
    return CLIENT.responses.parse(model=MODEL, instructions="You are a guide.", input=items, tools=[TOOL], store=False)


def streamed_response(items: list[Any]) -> Any:
    with CLIENT.responses.stream(model=MODEL, instructions="You are a guide.", input=items, tools=[TOOL], store=False) as stream:
        return stream.get_final_response()


for ask in (whole, parsed, streamed):
    chat(ask)
structured()
for request in (response, parsed_response, streamed_response):
    responses(request)
