"""Every error the client side raises on purpose.

    NeffcacheError
    ├── SettingsError              an environment variable holds something that cannot be used
    ├── NeffInvalid                bytes that are no usable NEFF container
    │   ├── NeffEmpty
    │   ├── NeffNotAContainer
    │   ├── NeffTruncated          length differs from what the header says
    │   └── NeffChecksumMismatch   payload differs from the header's own checksum
    ├── DigestMismatch             bytes differ from the SHA-256 they were stored under
    ├── CacheUnavailable           the server or store could not be used; the job compiles instead
    │   ├── ServerUnreachable      no answer: DNS, refused, time-out, TLS, broken body
    │   │   ├── ServerDown         nothing listens there, as while a server restarts
    │   │   └── AnswerLost         the request went out, its answer did not come: it may have been acted on
    │   └── ServerFault            an answer of 5xx, or one that makes no sense
    │       └── ServerBusy         502 or 503: a replica that stops, a proxy between two of them
    ├── RequestRefused             the server understood and said no (4xx); carries `code` and `status`
    │   ├── LeaseSuperseded        another holder has the lease: this one may change nothing any more
    │   └── NotAllowed             401 or 403
    ├── LocalTierError             the local folder cannot be written or read
    └── Aborted                    the caller died or gave up: everything was stopped and released

The default message of an error is the first line of its docstring.
"""

from __future__ import annotations


class NeffcacheError(Exception):
    """Something neffcache does on purpose could not be done."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip().splitlines()[0])


class SettingsError(NeffcacheError):
    """An environment variable holds a value that cannot be used."""


class NeffInvalid(NeffcacheError):
    """These bytes are not a usable NEFF."""

    code = "neff_invalid"


class NeffEmpty(NeffInvalid):
    """The file is empty: the compiler left nothing behind."""

    code = "neff_empty"


class NeffNotAContainer(NeffInvalid):
    """The file has no NEFF header."""

    code = "neff_not_a_container"


class NeffTruncated(NeffInvalid):
    """The file's length differs from what its header says."""

    code = "neff_truncated"


class NeffChecksumMismatch(NeffInvalid):
    """The payload differs from the checksum in the NEFF's own header."""

    code = "neff_checksum_mismatch"


class DigestMismatch(NeffcacheError):
    """The bytes differ from the SHA-256 they are stored under."""

    code = "digest_mismatch"


class CacheUnavailable(NeffcacheError):
    """The cache could not be used; compiling locally instead."""


class ServerUnreachable(CacheUnavailable):
    """The cache server gave no answer."""


class ServerDown(ServerUnreachable):
    """Nothing listens at the cache server's address."""


class AnswerLost(ServerUnreachable):
    """The connection broke before the answer: the server may have acted on the request."""


class ServerFault(CacheUnavailable):
    """The cache server gave an answer that cannot be used."""


class ServerBusy(ServerFault):
    """The cache server, or a proxy before it, asked to come again in a moment (502, 503)."""


class RequestRefused(NeffcacheError):
    """The cache server refused the request."""

    def __init__(self, message: str | None = None, *, code: str = "refused", status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class LeaseSuperseded(RequestRefused):
    """Another holder has the lease now; nothing of this one was stored."""


class NotAllowed(RequestRefused):
    """The token is missing, unknown, or lacks the right to do this."""


class LocalTierError(NeffcacheError):
    """The local cache folder could not be used."""


class Aborted(NeffcacheError):
    """The caller is gone; nothing was kept."""
