"""litellm's append loop: each answer goes back into the messages as it came, and the tool's result behind it."""

import json
import os

import litellm

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

messages = [{"role": "system", "content": "You are a guide."}, {"role": "user", "content": "How is the weather in Rome and in Oslo?"}]
while True:
    answer = litellm.completion(
        model=f"openai/{os.environ['MODEL']}", api_base=os.environ["OPENAI_BASE_URL"], messages=messages, tools=TOOLS
    )
    message = answer.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        city = json.loads(call.function.arguments)["city"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{city}: sunny"})
messages.append({"role": "user", "content": "Thank you."})
last = litellm.completion(model=f"openai/{os.environ['MODEL']}", api_base=os.environ["OPENAI_BASE_URL"], messages=messages, tools=TOOLS)
print(last.choices[0].message.content)
