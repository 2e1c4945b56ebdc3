"""httpx's errors and HTTP's status codes, in the words of `errors`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from neffcache_client import wire
from neffcache_client.errors import (
    AnswerLost,
    LeaseSuperseded,
    NotAllowed,
    RequestRefused,
    ServerBusy,
    ServerDown,
    ServerFault,
    ServerUnreachable,
)


@contextmanager
def translated() -> Iterator[None]:
    """Raises CacheUnavailable for whatever keeps a request from being answered."""
    try:
        yield
    except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as exc:
        raise AnswerLost(f"the connection to the cache broke: {_words(exc)}") from exc
    except httpx.TimeoutException as exc:
        raise ServerUnreachable(f"the cache did not answer in time ({type(exc).__name__})") from exc
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as exc:
        fault = ServerDown if _refused(exc) else ServerUnreachable
        raise fault(f"the cache cannot be reached: {_words(exc)}") from exc
    except (OSError, UnicodeError) as exc:
        raise ServerUnreachable(f"the cache cannot be reached: {_words(exc)}") from exc
    except RuntimeError as exc:
        # A heartbeat may be about to begin in its thread when the client is closed.
        if "closed" not in str(exc):
            raise
        raise ServerUnreachable("the connection to the cache was closed") from exc


def _refused(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ConnectionError):
        error = error.__cause__ or error.__context__
    return error is not None


def translated_chunks(response: httpx.Response) -> Iterator[bytes]:
    """The body as it comes. Raises CacheUnavailable when it breaks off."""
    # Only reading is translated: an OSError of whoever writes the chunks is not the network's. Chunks as they come:
    # gathering a MiB of a trickle first would keep its reader from noticing how slow it is.
    with translated():
        yield from response.iter_raw()


def raise_unless_blob(response: httpx.Response, own: bool) -> None:
    """Raise for anything but the bytes of a blob; `own`: the answer is the server's, not the store's."""
    if response.status_code == 200:
        return
    with translated():
        response.read()
    if own:
        raise_for(response)
    else:
        raise_for_store(response)
    raise ServerFault(f"a blob was answered with status {response.status_code}")


def raise_for(response: httpx.Response) -> None:
    """Raise for anything but 2xx."""
    status = response.status_code
    if 200 <= status < 300:
        return
    problem = _problem(response)
    where = f"the cache server answered {status}"
    if status >= 500 or status == 429:
        fault = ServerBusy if status in (502, 503) else ServerFault
        raise fault(f"{where}: {problem.detail or problem.title}" if problem else where)
    if status in (401, 403):
        detail = problem.detail if problem else "check NEFFCACHE_TOKEN"
        raise NotAllowed(f"{where}: {detail}", code=problem.code if problem else "not_allowed", status=status)
    if problem is None:
        # Not our server: a proxy, a login page, a wrong port.
        raise ServerFault(f"{where} without saying why: is NEFFCACHE_URL a neffcache server?")
    kind = LeaseSuperseded if status == 409 else RequestRefused
    raise kind(problem.detail or problem.title, code=problem.code, status=status)


def raise_for_store(response: httpx.Response) -> None:
    """The same for answers of the object store, which is no neffcache server and knows no tokens of ours."""
    if not 200 <= response.status_code < 300:
        found = re.search(r"<Code>(\w{1,64})</Code>", response.text[:2000])
        raise ServerFault(
            f"the object store answered {response.status_code}" + (f" ({found.group(1)})" if found else "")
        )


def _problem(response: httpx.Response) -> wire.Problem | None:
    try:
        return wire.from_json(wire.Problem, response.json())
    except ValueError:
        return None


def _words(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__
