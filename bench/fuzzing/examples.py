"""Valid bodies with many fields, as a start for mutations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "weather", "description": "The weather in a city."}


def examples(path: str, example: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The document's examples, and some with more fields."""
    small = {**example, **{name: 4 for name in ("max_tokens", "max_output_tokens") if name in example}}
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    match path:
        case "/v1/chat/completions":
            messages = [
                {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
                *({"role": "user", "content": "How is it in Rome?"}, {"role": "assistant", "content": None, "tool_calls": [call]}),
                {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
            ]
            tools = [{"type": "function", "function": {**_FUNCTION, "parameters": _SCHEMA}}]
            session = {"session_control": {"session_id": "s", "timeout": 5}}
            more: list[dict[str, Any]] = [
                {"messages": messages, "tools": tools, "tool_choice": "auto", "stream": True, "stream_options": {"include_usage": True}},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": _SCHEMA, "strict": True}}},
                {"tools": tools, "tool_choice": {"type": "function", "function": {"name": "weather"}}, "logit_bias": {"5": 1.5}},
                {"n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["a", "b"], "nvext": session, "stream": True},
            ]
        case "/v1/completions":
            more = [
                {"prompt": ["a", "b"], "echo": True, "logprobs": 1, "stream": True, "stream_options": {"resumable": True}},
                {"prompt": [[1, 2, 3], [4]], "best_of": 2, "stop_token_ids": [5], "structured_outputs": {"regex": "[a-z]+"}},
            ]
        case "/v1/messages" | "/v1/messages/count_tokens":
            tools = [{**_FUNCTION, "input_schema": _SCHEMA}]
            blocks = [
                {"role": "user", "content": [{"type": "text", "text": "How is it?", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Rome"}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "sunny"}]},
            ]
            more = [
                {"messages": blocks, "tools": tools, "tool_choice": {"type": "auto"}, "stream": True, "system": "Be brief."},
                {"tools": tools, "tool_choice": {"type": "tool", "name": "weather"}, "stop_sequences": ["x"], "metadata": {"user_id": "u"}},
                {"thinking": {"type": "adaptive"}, "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}}},
            ]
        case "/v1/responses" | "/v1/responses/input_tokens":
            tools = [{"type": "function", **_FUNCTION, "parameters": _SCHEMA}, {"type": "custom", "name": "shell"}]
            output = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
            items = [
                {"role": "user", "content": [{"type": "input_text", "text": "How is it?"}]},
                *({"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}, output),
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            ]
            more = [
                {"input": items, "tools": tools, "tool_choice": "auto", "instructions": "Be brief."},
                {"text": {"format": {"type": "json_schema", "name": "city", "schema": _SCHEMA}}, "reasoning": {"effort": "low"}},
            ]
            if path == "/v1/responses":
                more += [
                    {"stream": True, "store": False, "include": ["message.output_text.logprobs"]},
                    {"background": True},
                    {"stream": True},
                ]
        case "/tokenize":
            tools = [{"type": "function", "function": {**_FUNCTION, "parameters": _SCHEMA}}]
            return [small, {"model": "", "messages": [{"role": "user", "content": "x"}], "tools": tools}]
        case _:
            more = []
    return [small, *({**small, **fields} for fields in more)]
