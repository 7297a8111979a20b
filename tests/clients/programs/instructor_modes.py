"""instructor: structured output in its modes, with a second try after an answer that does not fit, and streamed."""

import os
from typing import Any

import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, field_validator

MODEL = os.environ["MODEL"]


class City(BaseModel):
    city: str
    sunny: bool


class Picky(City):
    @field_validator("city")
    @classmethod
    def is_oslo(cls, city: str) -> str:
        if city != "Oslo":
            raise ValueError("it must be Oslo")
        return city


def openai(mode: Any, question: str) -> None:
    client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
    messages: Any = [{"role": "system", "content": "You are a guide."}, {"role": "user", "content": question}]
    first = client.chat.completions.create(model=MODEL, messages=messages, response_model=City)
    assert first.model_dump() == {"city": "Rome", "sunny": True}, first
    found = client.chat.completions.create(model=MODEL, messages=messages, response_model=Picky, max_retries=2)
    assert found.city == "Oslo"
    parts = list(client.chat.completions.create_partial(model=MODEL, messages=messages, response_model=City))
    assert parts[-1].model_dump() == {"city": "Rome", "sunny": True}, parts
    print(mode.value)


def anthropic(mode: Any, question: str) -> None:
    client = instructor.from_anthropic(Anthropic(max_retries=0), mode=mode)
    messages: Any = [{"role": "user", "content": question}]
    found = client.messages.create(model=MODEL, max_tokens=500, messages=messages, response_model=Picky, max_retries=2)
    assert found.city == "Oslo"
    print(mode.value)


openai(instructor.Mode.TOOLS, "Rome, by tool.")
openai(instructor.Mode.JSON, "Rome, as JSON.")
openai(instructor.Mode.JSON_SCHEMA, "Rome, as JSON.")
anthropic(instructor.Mode.ANTHROPIC_TOOLS, "Rome, by tool.")
