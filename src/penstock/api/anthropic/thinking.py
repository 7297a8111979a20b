"""The signatures of thinking blocks: opaque to clients, who send them back as they came."""

from __future__ import annotations

import base64
import binascii
import hashlib

_OMITTED = "omitted."
_SHOWN = "shown."


def signature_of(thinking: str) -> str:
    """For a block that shows its thinking. Nothing depends on it: clients that find none send no block back."""
    return _SHOWN + hashlib.blake2b(thinking.encode(), digest_size=24, person=b"penstock-thought").hexdigest()


def sealed(thinking: str) -> str:
    """For a block that does not show its thinking: the next turn brings it along in here. It is no secret."""
    return _OMITTED + base64.b64encode(thinking.encode()).decode()


def unsealed(signature: str) -> str:
    """The thinking that was sealed; empty where there is none."""
    if not signature.startswith(_OMITTED):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_OMITTED), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
