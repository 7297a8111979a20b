"""Every error that Penstock raises on purpose.

    PenstockError
    ├── ConfigError             a flag or setting that cannot work; names key and value
    ├── RequestError            the client's mistake; names the field
    │   └── MessageError        a message that the model's chat template cannot render
    ├── GenerationFault         a generation ended in a Fault
    ├── GrammarError            a wrong grammar, or a token that it does not allow; says where
    ├── StreamError             the stream's contract is broken
    │   ├── GapError            tokens are missing between two deltas
    │   ├── OverlapError        tokens come twice
    │   ├── UnmergeableError    two deltas with fields that cannot be merged
    │   └── PutAfterTerminal    a delta or a second terminal after the terminal
    └── LinkError               the connection between a front end and a worker
        ├── LinkBroken          the connection ended
        │   └── PeerLeft        the other end closed it, and said why
        ├── WorkerStalled       the worker has running generations and was silent for too long
        ├── FrameTooLarge       a frame over the limit
        ├── FrameMalformed      bytes that are not a message, or an unexpected message
        └── HandshakeRefused    wrong version or wrong secret

Errors of other libraries are translated into these where they enter.
"""

from __future__ import annotations

from penstock.wire.messages import Fault

MAX_MESSAGE_CHARACTERS = 2000
MAX_PARAM_CHARACTERS = 256


class PenstockError(Exception):
    """The root of the tree."""


class ConfigError(PenstockError):
    """A setting that cannot work. The message names the key, the value and what is expected."""


class RequestError(PenstockError):
    """The client's mistake. `param` names the field, `code` is stable, `status` is the HTTP status. `retry_after`: after this many
    seconds the same request may succeed; None if unknown. `limit` is the name of the limit that refuses the request, for the metric.

    A long message or name is cut: it may quote megabytes of the request, and its client may never read the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        retry_after: float | None = None,
        limit: str | None = None,
    ) -> None:
        self.message = _cut(message, MAX_MESSAGE_CHARACTERS)
        super().__init__(self.message)
        self.param = None if param is None else _cut(param, MAX_PARAM_CHARACTERS)
        self.code = code
        self.status = status
        self.retry_after = retry_after
        self.limit = limit


class MessageError(RequestError):
    """A message that the model's chat template refuses or leaves out. `place` is its index among the messages of the chat."""

    def __init__(self, place: int, reason: str, field: str | None = None) -> None:
        field = field or f"messages[{place}]"
        super().__init__(f"`{field}`: {reason}", param=field, code="unsupported_message")
        self.place = place
        self._reason = reason

    def named(self, field: str) -> MessageError:
        """The same error with the field's name in the request."""
        return MessageError(self.place, self._reason, field)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "…"


def context_exceeded(context_length: int, what: str, tokens: int, max_tokens: int = 0, *, is_cut: bool = False) -> str:
    """What every API says of a prompt that does not fit. Clients look for these words of OpenAI, with plain numbers, and then shorten
    what they send. `is_cut`: counting stopped early, so the prompt has at least this many tokens."""
    least = "at least " if is_cut else ""
    if max_tokens:
        asked = f"you requested {least}{tokens + max_tokens} tokens ({tokens} in the {what}, {max_tokens} in the completion)"
        shorter = f"{what} or completion"
    else:
        asked, shorter = f"your {what} resulted in {least}{tokens} tokens", what
    limit = f"This model's maximum context length is {context_length} tokens."
    return f"{limit} However, {asked}, which exceeds the context window. Please reduce the length of the {shorter}."


class GenerationFault(PenstockError):
    """A generation ended in a fault. `grammar_field` is the request's field that has the grammar; the worker that refuses a grammar does
    not know it."""

    def __init__(self, fault: Fault, grammar_field: str | None = None) -> None:
        super().__init__(f"{fault.code}: {fault.message}")
        self.fault = fault
        self.grammar_field = grammar_field


class GrammarError(PenstockError):
    """A schema, regex or grammar that cannot be followed, or a token that does not follow it. The message says where."""


class StreamError(PenstockError):
    """The stream's contract is broken."""


class GapError(StreamError):
    """Tokens are missing: a delta starts after the end of what came before."""


class OverlapError(StreamError):
    """Tokens come twice: a delta starts before the end of what came before."""


class UnmergeableError(StreamError):
    """Two deltas with fields that cannot be merged, such as logprobs on only one of them."""


class PutAfterTerminal(StreamError):
    """Something was put into a stream that has ended."""


class LinkError(PenstockError):
    """A failure of the connection between a front end and a worker. `code` is sent to the peer.

    The message is one line and cut: it may quote a peer that has not proved itself, and goes into the log.
    """

    code = "link_error"

    def __init__(self, message: str = "") -> None:
        parts = [each if each.isprintable() else repr(each)[1:-1] for each in _cut(message, MAX_MESSAGE_CHARACTERS)]
        super().__init__("".join(parts))


class LinkBroken(LinkError):
    """The connection ended."""

    code = "link_broken"


class PeerLeft(LinkBroken):
    """The other end closed the link, and said why. It did not die."""


class WorkerStalled(LinkError):
    """The worker has running generations and was silent for longer than the stall time."""

    code = "worker_stalled"


class FrameTooLarge(LinkError):
    """The peer announced a frame over the limit."""

    code = "frame_too_large"


class FrameMalformed(LinkError):
    """The peer sent bytes that are not a message, or a message that is not expected here."""

    code = "frame_malformed"


class HandshakeRefused(LinkError):
    """The two ends do not agree on the version or the secret."""

    code = "handshake_refused"
