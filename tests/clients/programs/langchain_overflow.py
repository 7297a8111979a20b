"""langchain: a prompt that is too long is its ContextOverflowError, over three APIs, streamed and not. openai-agents passes it on."""

import os
from typing import Any

from agents import Agent, OpenAIResponsesModel, Runner, set_tracing_disabled
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, BadRequestError

MODEL = os.environ["MODEL"]
MODELS: list[Any] = [
    ChatOpenAI(model=MODEL, max_retries=0),
    ChatOpenAI(model=MODEL, max_retries=0, use_responses_api=True),
    ChatAnthropic(model_name=MODEL, max_retries=0, max_tokens_to_sample=500, timeout=None, stop=None),
]
LONG = "word " * 30_000

for model in MODELS:
    for ask in (model.invoke, lambda text, model=model: list(model.stream(text))):
        try:
            ask(LONG)
        except ContextOverflowError as error:
            print(type(error).__name__)
        except ValueError as error:
            print("ValueError", "context_length_exceeded" in str(error))

set_tracing_disabled(True)
agent = Agent(name="Guide", model=OpenAIResponsesModel(MODEL, openai_client=AsyncOpenAI(max_retries=0)))
try:
    Runner.run_sync(agent, LONG)
except BadRequestError as error:
    print(error.code)
