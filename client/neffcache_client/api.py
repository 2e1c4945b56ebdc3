"""The server's HTTP API, one method per call. With `answers` the only place that knows httpx and its errors.

Every method raises CacheUnavailable (nothing usable came back: a later try may work) or RequestRefused (the server
understood and said no). The bearer token goes to the server's own origin and nowhere else.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from json import dumps
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import httpx

from neffcache_client import wire
from neffcache_client.answers import raise_for, raise_for_store, raise_unless_blob, translated, translated_chunks
from neffcache_client.errors import ServerFault
from neffcache_client.explanation import Explanation, JobExplanation
from neffcache_client.settings import ClientSettings

CONNECT_SECONDS = 2.0
CALL_SECONDS = 10.0
STALL_SECONDS = 20.0
"""A transfer without a byte for this long is given up; its total time is not bounded."""
_POLL_GRACE_SECONDS = 10.0
_STORED_BYTES_PER_SECOND = 20e6
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 3

T = TypeVar("T")


class CacheClient:
    """Talks to one server in one namespace. Safe for use from several threads; close it when done."""

    def __init__(self, settings: ClientSettings) -> None:
        """Connects to nothing yet. Raises ServerUnreachable for an address or certificates that cannot be used."""
        self.url = settings.url
        self.namespace = settings.namespace
        headers = {"user-agent": "neffcache"}
        if settings.token:
            headers["authorization"] = f"Bearer {settings.token}"
        with translated():
            self._origin = _origin(httpx.URL(settings.url))
            self._http = httpx.Client(
                headers=headers,
                timeout=httpx.Timeout(CALL_SECONDS, connect=CONNECT_SECONDS),
                # Loading the certificates takes longer than a whole call to a plain http server. An empty context
                # trusts nobody, so it cannot be misused for https.
                verify=True if settings.url.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            )
        self._bare: httpx.Client | None = None

    def close(self) -> None:
        """Close the connections. Calls under way in other threads fail."""
        self._http.close()
        if self._bare is not None:
            self._bare.close()

    def __enter__(self) -> CacheClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Leases

    def acquire(
        self,
        key: str,
        request: wire.AcquireRequest,
        *,
        seconds: float | None = None,
        sent: Callable[[], None] | None = None,
    ) -> wire.AcquireAnswer:
        """Ask for a key. Lasts up to `request.wait_seconds` and a grace, or `seconds`.

        `sent` is called when a server has taken the question: from then on only its answer is waited for.
        """
        limit = seconds if seconds is not None else request.wait_seconds + _POLL_GRACE_SECONDS
        answer = self._call(
            wire.AcquireAnswer, "POST", self._ns(f"keys/{key}/acquire"), json=_body(request), seconds=limit, sent=sent
        )
        # A state without what belongs to it is as good as no answer; checked here so that nobody else has to.
        complete = {
            "hit": answer.artifact is not None,
            "leased": answer.epoch is not None,
            "busy": True,
            "failed": answer.failure is not None,
        }
        if not complete.get(answer.state, False):
            raise ServerFault(f"the cache server answered acquire with an unusable state {answer.state!r}")
        return answer

    def heartbeat(self, lease_id: str, request: wire.HeartbeatRequest) -> wire.HeartbeatAnswer:
        """Keep a lease. Raises LeaseSuperseded when it is somebody else's."""
        return self._call(wire.HeartbeatAnswer, "POST", self._ns(f"leases/{lease_id}/heartbeat"), json=_body(request))

    def release(self, lease_id: str, *, seconds: float = 2.0) -> None:
        """Give a lease back without a result."""
        self._request("DELETE", self._ns(f"leases/{lease_id}"), seconds=seconds)

    def publish(self, lease_id: str, request: wire.PublishRequest) -> wire.PublishAnswer:
        """Make the uploaded blob the key's artifact and end the lease. Verifying a large blob takes time."""
        return self._call(
            wire.PublishAnswer, "POST", self._ns(f"leases/{lease_id}/publish"), json=_body(request), seconds=60.0
        )

    def fail(self, lease_id: str, request: wire.FailRequest) -> wire.FailAnswer:
        """End a lease with a failure."""
        return self._call(wire.FailAnswer, "POST", self._ns(f"leases/{lease_id}/fail"), json=_body(request))

    def lookup(self, keys: list[str]) -> wire.LookupAnswer:
        """Which keys are present."""
        data = self._json("POST", self._ns("keys/lookup"), json={"keys": keys})
        try:
            return wire.LookupAnswer(
                present={k: wire.from_json(wire.Artifact, v) for k, v in data["present"].items()}
            )
        except (KeyError, AttributeError, TypeError, ValueError) as exc:
            raise ServerFault("the cache server answered a look-up with something else") from exc

    # Entries, failures, figures

    def entries(self, *, limit: int = 100, after: str | None = None) -> wire.EntryPage:
        """A page of entries, newest first."""
        query = urlencode({"limit": limit, **({"after": after} if after else {})})
        return self._call(wire.EntryPage, "GET", self._ns(f"entries?{query}"))

    def entry(self, key: str) -> wire.Entry:
        """One entry with its factors."""
        return self._call(wire.Entry, "GET", self._ns(f"entries/{key}"))

    def delete_entry(self, key: str) -> None:
        """Remove an entry."""
        self._request("DELETE", self._ns(f"entries/{key}"))

    def explain(self, key: str) -> Explanation:
        """Why a key missed; `key` may be the first digits of one."""
        return self._call(Explanation, "GET", self._ns(f"entries/{key}/explain"))

    def explain_job(self, job: str) -> JobExplanation:
        """What the ranks of a job missed."""
        return self._call(JobExplanation, "GET", self._ns(f"explain?{urlencode({'job': job})}"), seconds=60.0)

    def keep_summary(self, key: str, request: wire.SummaryRequest, *, seconds: float = CALL_SECONDS) -> None:
        """Tell what the graph of a missed key consists of."""
        self._request("POST", self._ns(f"keys/{key}/summary"), json=_body(request), seconds=seconds)

    def pin_entry(self, key: str, pinned: bool) -> None:
        """Keep an entry from garbage collection, or not any more."""
        self._request("PUT" if pinned else "DELETE", self._ns(f"entries/{key}/pin"))

    def quarantine_entry(self, key: str) -> None:
        """Serve an entry to nobody any more."""
        self._request("PUT", self._ns(f"entries/{key}/quarantine"))

    def failures(self) -> list[dict[str, Any]]:
        """Stored failures, each a Failure's fields and its key."""
        data = self._json("GET", self._ns("failures"))
        found = data.get("failures") if isinstance(data, dict) else data
        if not isinstance(found, list) or not all(isinstance(f, dict) for f in found):
            raise ServerFault("the cache server answered with something that is no list of failures")
        return found

    def clear_failure(self, key: str) -> None:
        """Forget the failure of a key, so that the next rank compiles."""
        self._request("DELETE", self._ns(f"failures/{key}"))

    def stats(self) -> wire.Stats:
        """Figures of this client's namespace."""
        return self._call(wire.Stats, "GET", f"/v1/stats?{urlencode({'namespace': self.namespace})}")

    def stats_of(self, *, job: str | None = None, since_seconds: float | None = None) -> wire.Stats:
        """The same of one job, or of the hours from that long ago on."""
        given = {"namespace": self.namespace, "job": job, "since_seconds": since_seconds}
        return self._call(
            wire.Stats, "GET", f"/v1/stats?{urlencode({k: v for k, v in given.items() if v is not None})}"
        )

    def report(self, request: wire.ReportsRequest) -> wire.ReportsAnswer:
        """Tell what the server could not see."""
        return self._call(wire.ReportsAnswer, "POST", self._ns("reports"), json=_body(request))

    def live(self) -> wire.Live:
        """What goes on now."""
        return self._call(wire.Live, "GET", f"/v1/live?{urlencode({'namespace': self.namespace})}")

    def jobs(self, *, limit: int = 100) -> list[wire.JobRow]:
        """Jobs, latest first."""
        return self._call(wire.JobList, "GET", self._ns(f"jobs?limit={limit}")).jobs

    def job(self, name: str, *, limit: int = 1000) -> wire.JobShow:
        """A job and its ranks."""
        return self._call(wire.JobShow, "GET", self._ns(f"job?{urlencode({'name': name, 'limit': limit})}"))

    def ready(self) -> str | None:
        """What ails the server's store, None when nothing does. Raises ServerFault when it takes no requests."""
        trouble = self._json("GET", "/readyz").get("store")
        return None if trouble is None else str(trouble)

    # Tokens

    def whoami(self) -> wire.WhoAmI:
        """What this client's token allows."""
        return self._call(wire.WhoAmI, "GET", "/v1/whoami")

    def create_token(self, request: wire.TokenRequest) -> wire.NewToken:
        """Make a token."""
        return self._call(wire.NewToken, "POST", "/v1/tokens", json=_body(request))

    def tokens(self, namespace: str | None = None) -> list[wire.TokenInfo]:
        """The tokens of a namespace, or of all that this client administers."""
        query = f"?{urlencode({'namespace': namespace})}" if namespace else ""
        return self._call(wire.TokenList, "GET", f"/v1/tokens{query}").tokens

    def revoke_token(self, token_id: str) -> None:
        """Make a token useless."""
        self._request("DELETE", f"/v1/tokens/{quote(token_id, safe='')}")

    # Blobs

    def upload_target(self, sha256: str, lease_id: str, request: wire.UploadRequest) -> wire.UploadAnswer:
        """Where the bytes shall go."""
        return self._call(
            wire.UploadAnswer,
            "POST",
            self._ns(f"blobs/{sha256}/upload"),
            json=_body(request),
            # A question, not a transfer: when it takes this long, the spool takes over.
            seconds=5.0,
            headers={wire.LEASE_HEADER: lease_id},
        )

    def report_damage(self, sha256: str, *, url: str | None = None) -> wire.BlobReport:
        """Tell that a blob came damaged twice; `url` is where an artifact said it is, else it is this namespace's.

        The server reads all of it before it answers.
        """
        blob = self._own_path(url) if url is not None else self._ns(f"blobs/{sha256}")
        return self._call(wire.BlobReport, "POST", f"{blob}/report", seconds=60.0)

    def put(self, url: str, content: Iterator[bytes], size: int, headers: dict[str, str]) -> None:
        """Send a blob to the server or, without any credential of ours, to the store behind a presigned URL.

        A refusal by the store is CacheUnavailable: another try gets another URL.
        """
        target = self._absolute(url)
        own = wire.LEASE_HEADER in headers and _origin(target) == self._origin
        # Both libraries ends up chunked, which stores refuse, unless the length is said.
        sent = {**headers, "content-length": str(size)}
        # Once it has everything, the server hands it to its store before it answers, and that takes time by size.
        answer = STALL_SECONDS + (size / _STORED_BYTES_PER_SECOND if own else 0.0)
        timeout = httpx.Timeout(STALL_SECONDS, connect=CONNECT_SECONDS, read=answer)
        with translated():
            response = (self._http if own else self._bare_client()).put(
                target, content=content, headers=sent, timeout=timeout
            )
        # 412: `If-None-Match: *` found the same blob there already. The server checks it at publish.
        if own:
            raise_for(response)
        elif response.status_code != 412:
            raise_for_store(response)

    @contextmanager
    def get(self, url: str) -> Iterator[Iterator[bytes]]:
        """The bytes of a blob in chunks, following redirects to the store without our token."""
        target = self._absolute(url)
        own = _origin(target) == self._origin
        for _ in range(_MAX_REDIRECTS + 1):
            response = self._open(target, own)
            try:
                location = response.headers.get("location", "")
                if response.status_code not in _REDIRECTS or not location:
                    raise_unless_blob(response, own)
                    yield translated_chunks(response)
                    return
            finally:
                response.close()
            # Wherever it leads, even to a store under the server's own name: the URL itself is the permission.
            with translated():
                target, own = target.join(location), False
        raise ServerFault("the cache server redirects a blob in circles")

    def _open(self, target: httpx.URL, own: bool) -> httpx.Response:
        http = self._http if own else self._bare_client()
        timeout = httpx.Timeout(STALL_SECONDS, connect=CONNECT_SECONDS)
        # A proxy that compresses in passing would change the bytes and their number.
        with translated():
            request = http.build_request("GET", target, headers={"accept-encoding": "identity"}, timeout=timeout)
            return http.send(request, stream=True)

    # Plumbing

    def _ns(self, path: str) -> str:
        return f"/v1/ns/{quote(self.namespace, safe='')}/{path}"

    def _own_path(self, url: str) -> str:
        """`url` as a path of the server's, such as a namespace's that ours only reads."""
        if not url.startswith("/"):
            raise ServerFault("the artifact is not the server's own")
        return url

    def _absolute(self, url: str) -> httpx.URL:
        try:
            # What the server calls a path begins where its own address ends, which may be below a proxy's folder.
            return httpx.URL(url if "://" in url else f"{self.url}/{url.removeprefix('/')}")
        except httpx.InvalidURL as exc:
            raise ServerFault("the cache server named an address that is none") from exc

    def _bare_client(self) -> httpx.Client:
        if self._bare is None:
            with translated():
                self._bare = httpx.Client(headers={"user-agent": "neffcache"})
        return self._bare

    def _call(
        self,
        kind: type[T],
        method: str,
        path: str,
        *,
        json: Any = None,
        seconds: float = CALL_SECONDS,
        headers: dict[str, str] | None = None,
        sent: Callable[[], None] | None = None,
    ) -> T:
        try:
            data = self._json(method, path, json=json, seconds=seconds, headers=headers, sent=sent)
            return wire.from_json(kind, data)
        except ValueError as exc:
            raise ServerFault(f"the cache server's answer makes no sense: {exc}") from exc

    def _json(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        seconds: float = CALL_SECONDS,
        headers: dict[str, str] | None = None,
        sent: Callable[[], None] | None = None,
    ) -> Any:
        response = self._request(method, path, json=json, seconds=seconds, headers=headers, sent=sent)
        try:
            return response.json()
        except ValueError as exc:
            raise ServerFault("the cache server answered with something that is no JSON") from exc

    def _request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        seconds: float = CALL_SECONDS,
        headers: dict[str, str] | None = None,
        sent: Callable[[], None] | None = None,
    ) -> httpx.Response:
        timeout = httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds))
        told = {"trace": _when_sent(sent)} if sent is not None else None
        given = dict(headers or {})
        if json is not None:
            given["content-type"] = "application/json"
        with translated():
            response = self._http.request(
                method,
                self.url + path,
                content=None if json is None else _encoded(json),
                headers=given,
                timeout=timeout,
                extensions=told,
            )
        raise_for(response)
        return response


def _when_sent(sent: Callable[[], None]) -> Callable[[str, Any], None]:
    def trace(event: str, info: Any) -> None:
        if event.endswith(".send_request_body.complete"):
            sent()

    return trace


def _body(request: Any) -> dict[str, Any]:
    return {k: v for k, v in asdict(request).items() if v is not None}


def _encoded(document: Any) -> bytes:
    # Names and options come from the environment, where bytes of any encoding occur: what is no Unicode is lost.
    return dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port or {"http": 80, "https": 443}.get(url.scheme)
