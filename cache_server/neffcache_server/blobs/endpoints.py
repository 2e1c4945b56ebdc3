"""Calls on blobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from neffcache_client.wire import LEASE_HEADER, BlobAnswer, BlobReport, UploadAnswer, UploadRequest, check_lease_id
from starlette.requests import ClientDisconnect

from neffcache_server.auth import require
from neffcache_server.blobs.quota import check_quota
from neffcache_server.blobs.ranges import parse_range
from neffcache_server.leases.repository import blob_url
from neffcache_server.problems import (
    BlobMissing,
    BlobRefused,
    BlobTooLarge,
    BlobUnknown,
    LeaseEnded,
    LeaseRequired,
    LeaseSuperseded,
    LeaseUnknown,
    QuotaExceeded,
    RangeNotSatisfiable,
    StorageUnavailable,
    UploadCut,
    documented,
)
from neffcache_server.state import AppState, Digest, Namespace
from neffcache_server.storage.base import BlobReader

router = APIRouter(prefix="/v1/ns/{namespace}/blobs", tags=["blobs"])

_LEASE_PROBLEMS = (LeaseRequired, LeaseUnknown, LeaseSuperseded, LeaseEnded, BlobTooLarge, QuotaExceeded)
_BINARY = {"schema": {"type": "string", "format": "binary"}}
LeaseHeader = Annotated[str | None, Header(alias=LEASE_HEADER, description="The lease the upload belongs to.")]


@router.post("/{sha256}/upload", responses=documented(*_LEASE_PROBLEMS, BlobRefused, StorageUnavailable))
@require("write")
async def upload_target(
    namespace: Namespace, sha256: Digest, body: UploadRequest, state: AppState, lease: LeaseHeader = None
) -> UploadAnswer:
    """Where to send a blob: to the store by a presigned URL, or to this server."""
    owner = await state.blobs.authorise(namespace, _lease_id(lease), body.size)
    await check_quota(state.database, state.settings, namespace, sha256, body.size)
    ticket = await state.presigned.issue(owner, sha256, body.size)
    return ticket or UploadAnswer(how="stream", url=blob_url(namespace, sha256))


@router.put(
    "/{sha256}",
    responses=documented(*_LEASE_PROBLEMS, BlobRefused, UploadCut, StorageUnavailable),
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": _BINARY}}},
)
@require("write")
async def put_blob(
    namespace: Namespace, sha256: Digest, request: Request, state: AppState, lease: LeaseHeader = None
) -> BlobAnswer:
    """Send a NEFF. It is checked while it streams in and refused with the reason when it is not whole and right."""
    size = _content_length(request)
    owner = await state.blobs.authorise(namespace, _lease_id(lease), size)
    await check_quota(state.database, state.settings, namespace, sha256, size)
    return await state.blobs.receive(owner, sha256, size, _body(request))


@router.post("/{sha256}/report", responses=documented(BlobUnknown, StorageUnavailable))
@require("read")
async def report_blob(namespace: Namespace, sha256: Digest, state: AppState) -> BlobReport:
    """Say that a blob came damaged: it is read again, and served to nobody any more if it is."""
    return BlobReport(verdict=await state.blobs.verifier.verify(namespace, sha256))


_DOWNLOAD_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The bytes.", "content": {"application/octet-stream": _BINARY}},
    206: {"description": "The asked range of the bytes.", "content": {"application/octet-stream": _BINARY}},
    304: {"description": "The caller has it already (If-None-Match)."},
    307: {"description": "The bytes are to be had from the store, at `Location`, without any token."},
    **documented(BlobUnknown, BlobMissing, RangeNotSatisfiable, StorageUnavailable),
}


@router.head("/{sha256}", response_class=Response, responses=_DOWNLOAD_RESPONSES)
@router.get("/{sha256}", response_class=Response, responses=_DOWNLOAD_RESPONSES)
@require("read")
async def get_blob(namespace: Namespace, sha256: Digest, request: Request, state: AppState) -> Response:
    """The bytes of a blob, whole or one range of them."""
    etag = f'"{sha256}"'
    reader = await state.blobs.open(namespace, sha256)
    handed_over = False
    try:
        url = await state.store.download_url(namespace, sha256)
        if url is not None:
            return RedirectResponse(url, 307)
        headers = {"etag": etag, "accept-ranges": "bytes", "cache-control": "private, immutable, max-age=31536000"}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if request.headers.get("if-range", etag) == etag:
            part = parse_range(request.headers.get("range"), reader.size)
        else:
            part = None
        start, stop = part or (0, reader.size)
        headers["content-length"] = str(stop - start)
        if part is not None:
            headers["content-range"] = f"bytes {start}-{stop - 1}/{reader.size}"
        status, kind = 206 if part is not None else 200, "application/octet-stream"
        if request.method == "HEAD":
            return Response(status_code=status, headers=headers, media_type=kind)
        handed_over = True
        return StreamingResponse(_bytes(reader, start, stop), status, headers, kind)
    finally:
        if not handed_over:
            await reader.close()


async def _bytes(reader: BlobReader, start: int, stop: int) -> AsyncIterator[bytes]:
    try:
        async for chunk in reader.chunks(start, stop):
            yield chunk
    finally:
        await reader.close()


async def _body(request: Request) -> AsyncIterator[bytes]:
    try:
        async for chunk in request.stream():
            if chunk:
                yield chunk
    except ClientDisconnect:
        raise UploadCut from None


def _lease_id(header: str | None) -> str:
    if header is None:
        raise LeaseRequired
    try:
        return check_lease_id(header)
    except ValueError as exc:
        raise LeaseRequired(str(exc)) from None


def _content_length(request: Request) -> int | None:
    # The HTTP parser has refused anything but digits already.
    length = request.headers.get("content-length")
    return int(length) if length is not None else None
