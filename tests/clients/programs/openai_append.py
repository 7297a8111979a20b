"""OpenAI's own client: each answer goes back into the messages as it came (`messages.append(message)`), and the tool's result behind it."""

import json
import os
from typing import Any

from openai import OpenAI

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def main() -> None:
    client, model = OpenAI(max_retries=0), os.environ["MODEL"]
    messages: list[Any] = [
        {"role": "system", "content": "You are a guide."},
        {"role": "user", "content": "How is the weather in Rome and in Oslo?"},
    ]
    while True:
        message = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            assert call.type == "function"
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: sunny"})
    messages.append({"role": "user", "content": "Thank you."})
    print(client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0].message.content)


main()
