"""Whoever makes a request, and what that allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["read", "write", "admin"]
ROLES: tuple[Role, ...] = ("read", "write", "admin")
EVERYTHING = "*"
"""In place of a namespace: all of them."""


@dataclass(slots=True, frozen=True)
class Principal:
    """A role in one namespace or in all. A role includes the ones below it: admin, write, read."""

    id: str
    """Public: the id of a token, `admin` for the token of the environment, `anonymous`."""
    name: str
    role: Role
    namespace: str
    trusted: str | None = None
    """The namespace whose artifacts this one's keys are looked up in too: may be read, never written."""
    limited: bool = True
    """Whether the number of requests a minute is bounded."""

    def may(self, role: Role, namespace: str) -> bool:
        """True when the principal has `role` in `namespace` (`*`: in every namespace)."""
        if self.namespace in (EVERYTHING, namespace) and ROLES.index(self.role) >= ROLES.index(role):
            return True
        return role == "read" and self.trusted is not None and self.trusted == namespace

    @property
    def rights(self) -> str:
        """In words, for a person who lacks one."""
        where = "every namespace" if self.namespace == EVERYTHING else f"namespace {self.namespace}"
        text = f"{self.role} in {where}"
        return f"{text}, read in namespace {self.trusted}" if self.trusted is not None else text
