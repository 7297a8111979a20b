"""A request as it came, and what reading it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.api.auth.keys import Tenant
from penstock.api.models import Models
from penstock.api.pipeline.hints import Headers
from penstock.text.transcript import Transcripts


@dataclass(frozen=True)
class Incoming:
    """A request whose body has been read, and whose it is. `path` has the parameters of its path, such as an id."""

    body: bytes
    headers: Headers
    tenant: Tenant
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        """Whose sessions and answers it may see."""
        return self.tenant.owner


@dataclass(frozen=True)
class Library:
    """Models and what was said before: from these a body becomes tokens."""

    models: Models
    transcripts: Transcripts
