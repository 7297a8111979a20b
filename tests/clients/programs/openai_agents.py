"""openai-agents: runs with a tool, streamed and not, over Responses and over chat; an output type; and a handoff."""

import asyncio
import os
from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(max_retries=0)
MODEL = os.environ["MODEL"]


def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: sunny"


class City(BaseModel):
    city: str
    sunny: bool


async def conversation(model: Any) -> None:
    agent = Agent(name="Guide", instructions="You are a guide.", model=model, tools=[function_tool(weather)])
    first = await Runner.run(agent, "How is the weather in Rome and in Oslo?")
    assert first.final_output == "Both are sunny.", first.final_output
    streamed = Runner.run_streamed(agent, [*first.to_input_list(), {"role": "user", "content": "And the weather tomorrow?"}])
    events = [event async for event in streamed.stream_events()]
    assert len(events) > 10, events
    assert streamed.final_output == "Both are sunny.", streamed.final_output
    last = await Runner.run(agent, [*streamed.to_input_list(), {"role": "user", "content": "Thank you."}])
    print(last.final_output)


async def structured(model: Any) -> None:
    agent = Agent(name="Guide", instructions="You are a guide.", model=model, output_type=City)
    found = await Runner.run(agent, "Rome, as JSON.")
    assert found.final_output == City(city="Rome", sunny=True), found.final_output
    print("structured")


async def handoff(model: Any) -> None:
    clerk = Agent(name="Clerk", instructions="You are a clerk.", model=model)
    guide = Agent(name="Guide", instructions="You are a guide.", model=model, handoffs=[clerk])
    found = await Runner.run(guide, "Hand me over.")
    print(found.last_agent.name, found.final_output)


async def main() -> None:
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(MODEL, openai_client=CLIENT)
        await conversation(model)
        await structured(model)
        await handoff(model)


asyncio.run(main())
