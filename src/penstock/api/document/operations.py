"""Every route of the API, as its document tells of it. A test holds this table against the application's routes."""

from __future__ import annotations

from penstock.api.anthropic.operations import ANTHROPIC_OPERATIONS
from penstock.api.document.operation import EXAMPLE_MODEL, GENERATES, HINTS, READS, Operation, Parameter, path_id
from penstock.api.openai import answers
from penstock.api.openai.schema import ChatRequest, CompletionRequest
from penstock.api.pipeline.detached import LAST_EVENT_ID
from penstock.api.responses.operations import RESPONSE_OPERATIONS
from penstock.api.sessions import DEFAULT_LIMIT, MAX_LIMIT
from penstock.api.tokenize import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest

_RESUME = (
    path_id("The id that the stream's events have."),
    Parameter(
        LAST_EVENT_ID.decode(),
        "header",
        "The id of the last event that came through; all are sent without.",
        {"type": "string", "pattern": "^[0-9]{1,15}$"},
    ),
)
_CHAT_EXAMPLE = {"model": EXAMPLE_MODEL, "messages": [{"role": "user", "content": "What is a penstock?"}], "max_tokens": 64}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        tag="OpenAI",
        summary="The next message of a chat",
        description="With `stream` its events come as they are generated; the last is `[DONE]`.",
        body=ChatRequest,
        answer=answers.ChatCompletion,
        event=answers.ChatCompletionChunk,
        parameters=HINTS,
        errors=GENERATES,
        example=_CHAT_EXAMPLE,
    ),
    Operation(
        method="GET",
        path="/v1/chat/completions/{id}",
        tag="OpenAI",
        summary="The rest of a chat's stream, for a client that was cut off",
        description="For streams that were asked for with `stream_options.resumable`.",
        event=answers.ChatCompletionChunk,
        parameters=_RESUME,
        errors=READS,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        tag="OpenAI",
        summary="What comes after a text",
        description="With `stream` its events come as they are generated; the last is `[DONE]`.",
        body=CompletionRequest,
        answer=answers.Completion,
        event=answers.Completion,
        parameters=HINTS,
        errors=GENERATES,
        example={"model": EXAMPLE_MODEL, "prompt": "A penstock is", "max_tokens": 32},
    ),
    Operation(
        method="GET",
        path="/v1/completions/{id}",
        tag="OpenAI",
        summary="The rest of a completion's stream, for a client that was cut off",
        description="For streams that were asked for with `stream_options.resumable`.",
        event=answers.Completion,
        parameters=_RESUME,
        errors=READS,
    ),
    *RESPONSE_OPERATIONS,
    *ANTHROPIC_OPERATIONS,
    Operation(method="GET", path="/v1/models", tag="Models", summary="The models that can be asked for now", answer=answers.ModelList),
    Operation(
        method="GET",
        path="/v1/models/{id}",
        tag="Models",
        summary="One model",
        answer=answers.Model,
        parameters=(path_id("Its name, which may have slashes."),),
        errors=(404, 503),
    ),
    Operation(
        method="GET",
        path="/v1/sessions",
        tag="Sessions",
        summary="The sessions of this API key",
        answer=answers.SessionList,
        parameters=(
            Parameter(
                "limit", "query", "How many at most.", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}
            ),
            Parameter("after", "query", "Those whose ids come after this one.", {"type": "string"}),
        ),
        errors=(400,),
    ),
    Operation(
        method="GET",
        path="/v1/sessions/{id}",
        tag="Sessions",
        summary="One session",
        answer=answers.Session,
        parameters=(path_id("Its id, which may have slashes."),),
        errors=(404,),
    ),
    Operation(
        method="DELETE",
        path="/v1/sessions/{id}",
        tag="Sessions",
        summary="Ends a session, now or when its last active turn ends",
        answer=answers.DeletedSession,
        parameters=(path_id("Its id, which may have slashes."),),
        errors=(404,),
    ),
    Operation(
        method="POST",
        path="/tokenize",
        tag="Tokens",
        summary="The tokens of a prompt, or of a chat",
        body=TokenizeRequest,
        answer=TokenizeAnswer,
        errors=READS,
        example={"model": EXAMPLE_MODEL, "prompt": "A penstock is", "return_token_strs": True},
    ),
    Operation(
        method="POST",
        path="/detokenize",
        tag="Tokens",
        summary="The text of tokens",
        body=DetokenizeRequest,
        answer=DetokenizeAnswer,
        errors=READS,
        example={"model": EXAMPLE_MODEL, "tokens": [49, 50, 51]},
    ),
    Operation(method="GET", path="/live", tag="Operation", summary="Whether the process runs", answer=answers.Liveness, needs_key=False),
    Operation(
        method="GET",
        path="/ready",
        tag="Operation",
        summary="Whether requests can be answered: 503 while no worker is there, and while the server drains",
        answer=answers.Readiness,
        error=answers.Readiness,
        errors=(503,),
        needs_key=False,
    ),
    Operation(method="GET", path="/metrics", tag="Operation", summary="Metrics for Prometheus", media_type="text/plain", needs_key=False),
    Operation(method="GET", path="/openapi.json", tag="Operation", summary="This document", media_type="application/json", needs_key=False),
    Operation(method="GET", path="/docs", tag="Operation", summary="This document, to be read", media_type="text/html", needs_key=False),
)
