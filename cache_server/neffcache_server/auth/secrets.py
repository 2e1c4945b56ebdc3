"""Making tokens, and the signatures of sessions."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time

PREFIX = "nct"
"""Tokens begin with it, so that scanners for leaked secrets can know them."""


def new_token() -> tuple[str, str]:
    """(public id, token). 256 bits of chance, so a plain SHA-256 of it is as good as the slowest hash."""
    public = secrets.token_hex(6)
    return public, f"{PREFIX}_{public}_{secrets.token_urlsafe(32)}"


def digest_of(token: str) -> str:
    """What is stored of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def new_key() -> str:
    """A key for signing sessions."""
    return secrets.token_hex(32)


def sign_session(key: str, token_id: str, digest: str, seconds: float) -> str:
    """A cookie that stands for a token for `seconds`. It does not hold the token, and dies with it."""
    payload = json.dumps([token_id, int(time.time() + seconds)]).encode()
    return f"{_text(payload)}.{_signature(key, digest, payload)}"


def read_session(cookie: str) -> tuple[str, bytes, str] | None:
    """(token id, signed part, signature) of a cookie that has not run out; nothing is verified yet."""
    body, _, signature = cookie.partition(".")
    try:
        payload = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
        token_id, until = json.loads(payload)
        if not isinstance(token_id, str) or float(until) < time.time():
            return None
    except (ValueError, TypeError):
        return None
    return token_id, payload, signature


def session_holds(key: str, digest: str, payload: bytes, signature: str) -> bool:
    """True when we signed `payload` for the token of that digest."""
    return hmac.compare_digest(signature.encode(), _signature(key, digest, payload).encode())


def _signature(key: str, digest: str, payload: bytes) -> str:
    # Keyed with the token's digest too: a new admin token in the environment ends the sessions of the old one.
    return hmac.new(bytes.fromhex(key) + digest.encode(), payload, hashlib.sha256).hexdigest()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
