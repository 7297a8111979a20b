"""GET /v1/models and /v1/models/{id}: what can be served now."""

from __future__ import annotations

from starlette.requests import Request
from starlette.routing import Route

from penstock.api.handlers import handled
from penstock.api.models import Models, ServedModel


def model_routes(models: Models) -> list[Route]:
    async def list_models(_: Request) -> object:
        return {"object": "list", "data": [_rendered(model) for model in models.all()]}

    async def get_model(request: Request) -> object:
        name = request.path_params["id"]
        live = next((model for model in models.all() if model.info.name == name), None)
        return _rendered(live or models.find(name))

    return [
        Route("/v1/models", handled({"GET": list_models})),
        # The names of models have slashes.
        Route("/v1/models/{id:path}", handled({"GET": get_model})),
    ]


def _rendered(model: ServedModel) -> dict[str, object]:
    info = model.info
    details = {
        "engine": info.engine,
        "tokenizer": info.tokenizer,
        "context_length": info.context_length,
        "workers": model.workers,
        "roles": info.roles,
        "capabilities": info.capabilities,
        "tool_parser": info.tool_parser,
        "reasoning_parser": info.reasoning_parser,
    }
    return {"id": info.name, "object": "model", "created": info.created, "owned_by": "penstock", "penstock": details}
