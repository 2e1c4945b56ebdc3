"""Every error the API answers with, and how it is written down (RFC 9457).

`code` is the stable name for programs, `detail` the sentence for people. An endpoint documents what it raises with
`responses=documented(LeaseUnknown, …)`, so documented and raised errors are one thing.
"""

from __future__ import annotations

from typing import Any

from neffcache_client.wire import Problem

MEDIA_TYPE = "application/problem+json"


class ServerProblem(Exception):
    """Something the API answers with an error. The default detail is the docstring's first line."""

    status = 500
    code = "internal_error"
    title = "Internal error"

    def __init__(self, detail: str | None = None, *, code: str | None = None) -> None:
        self.detail = detail or (type(self).__doc__ or "").strip().splitlines()[0]
        if code is not None:
            self.code = code
        super().__init__(self.detail)

    def problem(self) -> Problem:
        return Problem(title=self.title, status=self.status, code=self.code, detail=self.detail)


class InvalidRequest(ServerProblem):
    """The request is not what this call takes."""

    status, code, title = 422, "invalid_request", "Invalid request"


class TokenRequired(ServerProblem):
    """A token is needed: send it as `Authorization: Bearer TOKEN`."""

    status, code, title = 401, "token_required", "Token required"


class NotAllowed(ServerProblem):
    """The token lacks the right to do this."""

    status, code, title = 403, "not_allowed", "Not allowed"


class WriteNeeded(NotAllowed):
    """Nobody has or compiles this key, and this token may only read."""

    code = "write_needed"


class CrossSite(ServerProblem):
    """A page of another site made the browser send this; nothing was done."""

    status, code, title = 403, "cross_site", "Refused"


class TooManyRequests(ServerProblem):
    """This token makes more requests than the server takes; wait a little."""

    status, code, title = 429, "too_many_requests", "Too many requests"


class TokenUnknown(ServerProblem):
    """There is no token of that id, or none that you administer."""

    status, code, title = 404, "token_unknown", "Unknown token"


class QuotaExceeded(ServerProblem):
    """The namespace holds as many bytes as it may; nothing was stored."""

    status, code, title = 413, "quota_exceeded", "Quota exceeded"


class RouteUnknown(ServerProblem):
    """There is no such call."""

    status, code, title = 404, "route_unknown", "Not found"


class MethodNotAllowed(ServerProblem):
    """This path does not take that method."""

    status, code, title = 405, "method_not_allowed", "Method not allowed"


class LeaseUnknown(ServerProblem):
    """No lease of that id is known here: it was never granted, or ended long ago."""

    status, code, title = 404, "lease_unknown", "Unknown lease"


class LeaseSuperseded(ServerProblem):
    """Another holder has the lease of this key now; nothing of this one was stored."""

    status, code, title = 409, "lease_superseded", "Lease superseded"


class LeaseEnded(ServerProblem):
    """This lease has ended and cannot be used again; ask with a new lease id."""

    status, code, title = 409, "lease_ended", "Lease ended"


class LeaseIdReused(ServerProblem):
    """This lease id belongs to another key; make a new one for every key."""

    status, code, title = 409, "lease_id_reused", "Lease id used twice"


class LeaseRequired(ServerProblem):
    """An upload names the lease it belongs to in the header neffcache-lease."""

    status, code, title = 403, "lease_required", "Lease required"


class EntryUnknown(ServerProblem):
    """Nothing is published under that key."""

    status, code, title = 404, "entry_unknown", "Unknown key"


class KeyUnknown(ServerProblem):
    """Nobody has asked for that key in this namespace."""

    status, code, title = 404, "key_unknown", "Unknown key"


class KeyAmbiguous(ServerProblem):
    """Several keys begin with these digits; give more of them."""

    status, code, title = 422, "key_ambiguous", "Ambiguous key"


class JobUnknown(ServerProblem):
    """No miss of that job is known: everything it asked for was there, or it is long ago."""

    status, code, title = 404, "job_unknown", "Unknown job"


class FailureUnknown(ServerProblem):
    """No failure is kept for that key."""

    status, code, title = 404, "failure_unknown", "No such failure"


class BlobUnknown(ServerProblem):
    """This namespace holds no blob of that digest."""

    status, code, title = 404, "blob_unknown", "Unknown blob"


class BlobMissing(ServerProblem):
    """The blob has disappeared from the store; its keys will be compiled again."""

    status, code, title = 404, "blob_missing", "Blob is gone"


class BlobNotUploaded(ServerProblem):
    """This lease has not uploaded that blob; upload it, then publish."""

    status, code, title = 422, "blob_not_uploaded", "Blob not uploaded"


class RangeNotSatisfiable(ServerProblem):
    """The asked range lies outside the blob."""

    status, code, title = 416, "range_not_satisfiable", "Range not satisfiable"


class BlobTooLarge(ServerProblem):
    """The blob is larger than this server takes."""

    status, code, title = 413, "blob_too_large", "Too large"


class FactorsTooLarge(ServerProblem):
    """The key's factors are larger than this server keeps."""

    status, code, title = 413, "factors_too_large", "Too large"


class BlobRefused(ServerProblem):
    """These bytes are not the NEFF they claim to be; nothing was stored."""

    status, code, title = 422, "neff_invalid", "Refused"


class UploadCut(ServerProblem):
    """The upload ended before all of it had arrived; nothing was stored."""

    status, code, title = 400, "upload_cut", "Upload incomplete"


class DatabaseUnavailable(ServerProblem):
    """The cache's database cannot be used at the moment."""

    status, code, title = 503, "database_unavailable", "Database unavailable"


class StorageUnavailable(ServerProblem):
    """The cache's blob store cannot be used at the moment."""

    status, code, title = 503, "storage_unavailable", "Storage unavailable"


class ShuttingDown(ServerProblem):
    """This server is shutting down; ask again, another may answer."""

    status, code, title = 503, "shutting_down", "Shutting down"


class ClientGone(ServerProblem):
    """The client hung up while it waited, so nothing was granted."""

    status, code, title = 503, "client_gone", "Client gone"


class SetupError(Exception):
    """The server cannot start as configured; the message says what to change."""


_SCHEMA = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}


def documented(*kinds: type[ServerProblem]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI `responses` of an endpoint that may raise `kinds`."""
    texts: dict[int | str, list[str]] = {}
    for kind in kinds:
        line = (kind.__doc__ or "").strip().splitlines()[0]
        texts.setdefault(kind.status, []).append(f"`{kind.code}`: {line}")
    return {status: {"description": "\n\n".join(lines), "content": _SCHEMA} for status, lines in texts.items()}
