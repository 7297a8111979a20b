"""pydantic-ai: an agent with a tool, streamed and not, over three APIs, and structured output by a tool and by a schema."""

import asyncio
import os
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

MODEL = os.environ["MODEL"]
OPENAI = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
ANTHROPIC = AnthropicProvider(base_url=os.environ["ANTHROPIC_BASE_URL"], api_key=os.environ["ANTHROPIC_API_KEY"])
MODELS: list[Any] = [
    OpenAIChatModel(MODEL, provider=OPENAI),
    OpenAIResponsesModel(MODEL, provider=OPENAI),
    AnthropicModel(MODEL, provider=ANTHROPIC),
]


class City(BaseModel):
    city: str
    sunny: bool


def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: sunny"


async def conversation(model: Any) -> None:
    agent = Agent(model, instructions="You are a guide.", tools=[weather])
    first = await agent.run("How is the weather in Rome and in Oslo?")
    assert first.output == "Both are sunny.", first.output
    async with agent.run_stream("And the weather tomorrow?", message_history=first.all_messages()) as streamed:
        text = await streamed.get_output()
    assert text == "Both are sunny.", text
    print((await agent.run("Thank you.", message_history=streamed.all_messages())).output)


async def structured(model: Any) -> None:
    by_tool = await Agent(model, instructions="You are a guide.", output_type=City).run("Rome, by tool.")
    assert by_tool.output == City(city="Rome", sunny=True)
    # Of Anthropic's models, pydantic-ai knows by their names which have schemas.
    if not isinstance(model, AnthropicModel):
        by_schema = await Agent(model, instructions="You are a guide.", output_type=NativeOutput(City)).run("Rome, as JSON.")
        assert by_schema.output == by_tool.output
    print("structured")


async def main() -> None:
    for model in MODELS:
        await conversation(model)
        await structured(model)


asyncio.run(main())
