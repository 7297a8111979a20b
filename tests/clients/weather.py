"""The script that the libraries' programs talk to: a guide who knows the weather by a tool, and who can answer in JSON."""

from __future__ import annotations

import json

from clients.upstream import Prompt, tool_call

CITY = {"city": "Rome", "sunny": True}
SUNNY = "Both are sunny."
WELCOME = "You are welcome."


def weather(prompt: Prompt) -> str:
    """What the model says depends on the last message: a tool's result, a question for the weather or for JSON, or anything else."""
    last = prompt.text.rsplit("<|im_start|>user\n", 1)[1]
    if "<tool_response>" in last:
        return SUNNY
    if "JSON" in last:
        return json.dumps(CITY)
    if "by tool" in last:
        # A library asks for structured output by a tool that it names itself.
        name = json.loads(prompt.text.split("<tools>\n", 1)[1].split("\n", 1)[0])["function"]["name"]
        return tool_call(name, **CITY)
    if "weather" in last:
        return tool_call("weather", city="Rome") + tool_call("weather", city="Oslo")
    return WELCOME
