"""An endpoint: from the body of a request to the end of its answer, whatever goes wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from penstock.api.auth.gate import TENANT
from penstock.api.errors import ErrorShape
from penstock.api.pipeline.request import ClientGone, Incoming, read_body
from penstock.api.pipeline.response import Response
from penstock.config.front_end import Limits
from penstock.metrics.frontend import FrontEndMetrics
from penstock.stream.fanin import ReaderLeft
from penstock.wire.errors import GenerationFault, RequestError

log = logging.getLogger(__name__)

Answer = Callable[[Incoming, Receive, Response], Awaitable[str]]
"""Answers a request and returns the outcome. May raise RequestError, GenerationFault, ReaderLeft and ClientGone."""


@dataclass(frozen=True)
class Endpoint:
    """Reads the body of a request and has it answered. Errors have the shape of the request's API.

    It is an ASGI application: nothing stands between a stream and the server.
    """

    route: str | None
    """The name of the route in the metric of requests. None: requests are not counted."""
    answer: Answer
    limits: Limits
    metrics: FrontEndMetrics
    errors: ErrorShape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant, errors = scope[TENANT], self.errors.fresh()
        response = Response(send, self.metrics.tally, lambda: [*tenant.quota.headers(), *errors.headers])
        outcome = "failed"
        try:
            outcome = await self._answer(scope, receive, response)
        except RequestError as error:
            outcome = f"refused_{error.status}"
            await response.send_error(errors.request_status(error), errors.of_request(error), error.retry_after)
        except GenerationFault as error:
            outcome = "fault"
            await response.send_error(errors.fault_status(error), errors.of_fault(error))
        except ReaderLeft:
            outcome = "client_left"
            self.metrics.tally.clients_left += 1
        except ClientGone:
            outcome = "client_left"
            self.metrics.tally.clients_left += 1
            # The client may still be there: a body with a broken encoding looks the same.
            incomplete = RequestError("the body broke off before its end", code="incomplete_body")
            await response.send_error(errors.request_status(incomplete), errors.of_request(incomplete))
        except asyncio.CancelledError:
            # Raising leaves the response unfinished: its client cannot mistake it for a complete one.
            outcome = "stalled" if response.stalled else "cancelled"
            raise
        except Exception:
            log.exception("a request failed")
            if not response.started:
                await response.send_error(500, errors.of_request(RequestError("internal error", code="internal_error", status=500)))
            raise
        finally:
            if self.route is not None:
                self.metrics.tally.requests[self.route, outcome] += 1

    async def _answer(self, scope: Scope, receive: Receive, response: Response) -> str:
        body = await read_body(scope, receive, self.limits.max_body_bytes, self.limits.stall_seconds)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)) if scope["query_string"] else {}
        incoming = Incoming(body, scope["headers"], scope[TENANT], scope.get("path_params", {}), query)
        return await self.answer(incoming, receive, response)
