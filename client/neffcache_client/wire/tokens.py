"""Who may do what."""

from __future__ import annotations

from dataclasses import dataclass

from neffcache_client.wire.base import NESTED, ROLES, Role, check_namespace


@dataclass(slots=True, kw_only=True)
class WhoAmI:
    """What a token allows: a role in one namespace or all (`*`), and reading the trusted one."""

    id: str
    name: str
    role: Role
    namespace: str
    trusted: str | None = None
    now: float = 0.0
    """What the database's clock shows."""

    def may(self, role: Role, namespace: str) -> bool:
        """True when the token has `role` in `namespace`."""
        if role == "read" and namespace == self.trusted:
            return True
        return self.namespace in ("*", namespace) and ROLES.index(self.role) >= ROLES.index(role)


@dataclass(slots=True, kw_only=True)
class TokenRequest:
    """A token to be made."""

    name: str
    role: Role
    namespace: str
    expires_in_seconds: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= 255 or not self.name.isprintable():
            raise ValueError("name must have 1 to 255 printable characters")
        if self.namespace != "*":
            check_namespace(self.namespace)
        if self.expires_in_seconds is not None and not 1 <= self.expires_in_seconds <= 1e9:
            raise ValueError("expires_in_seconds must be between 1 and 1e9")


@dataclass(slots=True, kw_only=True)
class TokenInfo:
    """A token without its secret."""

    id: str
    name: str
    role: Role
    namespace: str
    created_by: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


@dataclass(slots=True, kw_only=True)
class NewToken:
    """A token just made: this answer is the only place where it is shown."""

    token: str
    info: TokenInfo


@dataclass(slots=True, kw_only=True)
class TokenList:
    """Tokens, newest first."""

    tokens: list[TokenInfo]


@dataclass(slots=True, kw_only=True)
class LoginRequest:
    """A token to be exchanged for a session cookie."""

    token: str

    def __post_init__(self) -> None:
        if len(self.token) > 512:
            raise ValueError("token is longer than 512 characters")


NESTED.update(
    {
        ("NewToken", "info"): TokenInfo,
        ("TokenList", "tokens"): TokenInfo,
    }
)
