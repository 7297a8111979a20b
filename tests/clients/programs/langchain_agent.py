"""langchain: an agent with a tool, streamed and not, over three APIs, and structured output."""

import os
from typing import Any

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
MODELS: list[Any] = [
    ChatOpenAI(model=MODEL, max_retries=0),
    ChatOpenAI(model=MODEL, max_retries=0, use_responses_api=True, output_version="responses/v1"),
    ChatAnthropic(model_name=MODEL, max_retries=0, max_tokens_to_sample=500, timeout=None, stop=None),
]


class City(BaseModel):
    """A city."""

    city: str
    sunny: bool


def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: sunny"


def text(message: Any) -> str:
    return message.text if isinstance(message.text, str) else message.text()


def conversation(model: Any) -> None:
    agent = create_agent(model, tools=[weather], system_prompt="You are a guide.")
    state: Any = agent.invoke({"messages": [{"role": "user", "content": "How is the weather in Rome and in Oslo?"}]})
    assert text(state["messages"][-1]) == "Both are sunny.", state["messages"][-1]
    asked = [*state["messages"], {"role": "user", "content": "And the weather tomorrow?"}]
    pieces: Any = list(agent.stream({"messages": asked}, stream_mode=["messages", "values"]))
    assert len([piece for kind, piece in pieces if kind == "messages"]) > 4
    messages = [piece for kind, piece in pieces if kind == "values"][-1]["messages"]
    state = agent.invoke({"messages": [*messages, {"role": "user", "content": "Thank you."}]})
    print(text(state["messages"][-1]))


def structured(model: Any, method: str, question: str) -> None:
    assert model.with_structured_output(City, method=method).invoke(question) == City(city="Rome", sunny=True)
    print(method)


for model in MODELS:
    conversation(model)
for model in MODELS[:2]:
    structured(model, "function_calling", "Rome, by tool.")
    structured(model, "json_schema", "Rome, as JSON.")
structured(MODELS[0], "json_mode", "Rome, as JSON.")
structured(MODELS[2], "function_calling", "Rome, by tool.")
structured(MODELS[2], "json_schema", "Rome, as JSON.")
