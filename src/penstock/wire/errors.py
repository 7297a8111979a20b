"""Every error that Penstock raises on purpose.

    PenstockError
    ├── ConfigError             a flag or setting that cannot work; names key and value
    ├── RequestError            the client's mistake; names the field
    ├── GenerationFault         a generation ended in a Fault
    ├── GrammarError            a grammar that cannot be, or a text that it does not allow; says where
    ├── StreamError             a breach of the stream's contract: loud, never silent
    │   ├── GapError            tokens are missing between two deltas
    │   ├── OverlapError        tokens come twice
    │   ├── UnmergeableError    two deltas whose fields do not fit together
    │   └── PutAfterTerminal    a delta or a second terminal after the terminal
    └── LinkError               the connection between a front end and a worker
        ├── LinkBroken          it ended
        ├── WorkerStalled       the worker owes tokens and has said nothing for too long
        ├── FrameTooLarge       a frame over the limit
        ├── FrameMalformed      bytes that are no message, or a message out of place
        └── HandshakeRefused    wrong version or wrong secret

Errors of other libraries are translated into these where they enter.
"""

from __future__ import annotations

from penstock.wire.messages import Fault


class PenstockError(Exception):
    """The root of the tree."""


class ConfigError(PenstockError):
    """A setting that cannot work. The message names the key, the value and what would be right."""


class RequestError(PenstockError):
    """The client's mistake: `param` names the field, `code` is stable, `status` is what HTTP would say. `retry_after` is in how many
    seconds the same request may be right, where that is known."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.retry_after = retry_after


class GenerationFault(PenstockError):
    """A generation ended in a fault instead of a finish. `grammar_field` is where its request has its grammar, for one that is refused:
    the worker that refuses it does not know."""

    def __init__(self, fault: Fault, grammar_field: str | None = None) -> None:
        super().__init__(f"{fault.code}: {fault.message}")
        self.fault = fault
        self.grammar_field = grammar_field


class GrammarError(PenstockError):
    """A schema, regex or grammar that cannot be followed, or a token that does not follow it. The message says where."""


class StreamError(PenstockError):
    """A breach of the stream's contract."""


class GapError(StreamError):
    """Tokens are missing: a delta starts after the end of what came before."""


class OverlapError(StreamError):
    """Tokens come twice: a delta starts before the end of what came before."""


class UnmergeableError(StreamError):
    """Two deltas whose fields do not fit together, such as logprobs on one of them only."""


class PutAfterTerminal(StreamError):
    """Something was put into a stream that had already ended."""


class LinkError(PenstockError):
    """Something is wrong with the connection between a front end and a worker. `code` goes over the wire."""

    code = "link_error"


class LinkBroken(LinkError):
    """The connection ended."""

    code = "link_broken"


class WorkerStalled(LinkError):
    """The worker owes tokens and has said nothing for longer than the stall time."""

    code = "worker_stalled"


class FrameTooLarge(LinkError):
    """The peer announced a frame over the limit."""

    code = "frame_too_large"


class FrameMalformed(LinkError):
    """The peer sent bytes that are no message, or a message that has no place here."""

    code = "frame_malformed"


class HandshakeRefused(LinkError):
    """The two ends do not agree on the version or the secret."""

    code = "handshake_refused"
