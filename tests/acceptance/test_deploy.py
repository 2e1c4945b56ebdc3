"""docker-compose.yml as plain processes: the same commands, the same environment, a real PostgreSQL and SeaweedFS."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.cache_state import lease_id, neff
from support.compose import ROOT, compose
from support.leash import Leashed, free_port
from support.postgres import Postgres

BIN = Path(sys.executable).parent
HAPROXY = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
HOLDER = {"host": "h0", "boot": "b0", "pid": 7}
TOKEN = "a-token-of-the-deployment-test"


@dataclass
class Stack:
    """What `docker compose up` leaves running."""

    url: str
    store: str
    database: str
    servers: dict[str, Leashed]
    environment: dict[str, str]

    def command(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """`neffcache …` on a machine of the cluster."""
        own = {"PATH": os.environ["PATH"], "NEFFCACHE_URL": self.url, "NEFFCACHE_TOKEN": TOKEN, **env}
        return subprocess.run(
            [str(BIN / "neffcache"), *arguments], env=own, capture_output=True, text=True, timeout=120
        )


@pytest.fixture(scope="module")
def stack(postgres: Postgres) -> Iterator[Stack]:
    if HAPROXY is None:
        pytest.fail("haproxy is not installed: `make system`")
    with ExitStack() as cleaning:
        folder = Path(tempfile.mkdtemp(prefix="neffcache-deploy-", dir="/tmp"))
        cleaning.callback(shutil.rmtree, folder, ignore_errors=True)
        s3_port = free_port()
        services = compose(
            {
                "CACHE_ADMIN_TOKEN": TOKEN,
                "POSTGRES_PASSWORD": "f00d",
                "S3_ACCESS_KEY": "deploy-test",
                "S3_SECRET_KEY": "deploy-test-secret",
                "S3_PUBLIC_URL": f"http://127.0.0.1:{s3_port}",
            }
        )
        database = postgres.create_empty()
        names = {
            "postgresql://neffcache:f00d@postgres:5432/neffcache": postgres.url(database),
            "http://s3:8333": f"http://127.0.0.1:{s3_port}",
        }
        cleaning.enter_context(object_store(services, folder, s3_port))
        environment = own_environment(services["migrate"]["environment"], names)
        neffcache(services["migrate"]["command"], environment, folder)
        servers, ports = {}, {}
        for name in ("cache-a", "cache-b"):
            ports[name] = free_port()
            env = own_environment(services[name]["environment"], names)
            env |= {"NEFFCACHE_SERVER_PORT": str(ports[name]), "NEFFCACHE_SERVER_DATA_DIR": str(folder / name)}
            servers[name] = Leashed(
                [str(BIN / "neffcache"), *services[name]["command"]], log=folder / f"{name}.log", env=env
            )
            cleaning.callback(servers[name].stop)
        for name, server in servers.items():
            server.wait_ready(lambda name=name: answers(f"http://127.0.0.1:{ports[name]}/readyz"))  # type: ignore[misc]
        url = cleaning.enter_context(proxy(services, folder, ports))
        yield Stack(url, f"http://127.0.0.1:{s3_port}", database, servers, environment)


def own_environment(given: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """A container's environment, with this machine's addresses."""
    env = {
        "PATH": os.environ["PATH"],
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }
    return env | {name: names.get(value, value) for name, value in given.items()}


@contextmanager
def object_store(services: dict[str, Any], folder: Path, port: int) -> Iterator[None]:
    """The services `s3` and `bucket`."""
    ports = {f"{n}.port{k}": free_port() for n in ("master", "volume", "filer") for k in ("", ".grpc")}
    here = {"-dir=/data": f"-dir={folder}", "-ip=s3": "-ip=127.0.0.1", "-ip.bind=0.0.0.0": "-ip.bind=127.0.0.1"}
    here |= {"-s3.port=8333": f"-s3.port={port}", "-volume.max=0": "-volume.max=20"}
    command = [here.get(argument, argument) for argument in services["s3"]["command"]]
    command += [f"-{name}={number}" for name, number in ports.items()]
    command += [f"-s3.port.grpc={free_port()}", "-s3.port.iceberg=0", "-master.volumeSizeLimitMB=256"]
    command += [f"-{name}.localSocket={folder / name}.sock" for name in ("filer", "s3")]
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), **services["s3"]["environment"]}
    store = Leashed([str(BIN / "weed"), *command], log=folder / "weed.log", env=env, folder=folder)
    try:
        store.wait_ready(lambda: answers(f"http://127.0.0.1:{port}/healthz"))
        (script,) = services["bucket"]["command"]
        script = script.replace("s3:9333", f"127.0.0.1:{ports['master.port']}.{ports['master.port.grpc']}")
        script = script.replace("s3:8888", f"127.0.0.1:{ports['filer.port']}.{ports['filer.port.grpc']}")
        path = f"{BIN}:{os.environ['PATH']}"
        for _ in range(2):
            subprocess.run(
                [*services["bucket"]["entrypoint"], script],
                env={"PATH": path, "HOME": str(folder)},
                check=True,
                capture_output=True,
                timeout=60,
            )
        yield
    finally:
        store.stop(9)


@contextmanager
def proxy(services: dict[str, Any], folder: Path, ports: Mapping[str, int]) -> Iterator[str]:
    """The service `proxy`."""
    text = (ROOT / "deploy" / "haproxy.cfg").read_text()
    port = free_port()
    text = text.replace("bind :8765", f"bind 127.0.0.1:{port}")
    for name, number in ports.items():
        assert f"{name}:8765" in text
        text = text.replace(f"{name}:8765", f"127.0.0.1:{number}")
    # This machine has fewer file descriptors to give, and no name server of Docker's.
    text = text.replace("maxconn 20000", "maxconn 1000")
    text = re.sub(r"resolvers docker\n(    .*\n)+", "", text).replace(" resolvers docker init-addr libc,none", "")
    (folder / "haproxy.cfg").write_text(text)
    program, *arguments = services["proxy"]["command"]
    assert program == "haproxy"
    arguments = [str(folder / "haproxy.cfg") if a.endswith("haproxy.cfg") else a for a in arguments]
    process = Leashed([str(HAPROXY), *arguments], log=folder / "haproxy.log", folder=folder)
    try:
        url = f"http://127.0.0.1:{port}"
        process.wait_ready(lambda: answers(f"{url}/readyz"))
        yield url
    finally:
        process.stop()


def neffcache(arguments: list[str], env: dict[str, str], folder: Path) -> None:
    env = {**env, "NEFFCACHE_SERVER_DATA_DIR": str(folder / "data")}
    subprocess.run([str(BIN / "neffcache"), *arguments], env=env, check=True, timeout=120, capture_output=True)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status) == 200
    except OSError:
        return False


def published(url: str, key: str, data: bytes, number: int, token: str = TOKEN) -> str:
    """A NEFF under a key, sent to the store directly as a rank does; its digest."""
    sha256, lease = hashlib.sha256(data).hexdigest(), {"neffcache-lease": lease_id(number)}
    with httpx.Client(base_url=f"{url}/v1/ns/main/", headers={"authorization": f"Bearer {token}"}, timeout=60) as api:
        body = {"lease_id": lease_id(number), "holder": HOLDER}
        assert api.post(f"keys/{key}/acquire", json=body).json()["state"] == "leased"
        target = api.post(f"blobs/{sha256}/upload", json={"size": len(data)}, headers=lease).json()
        assert target["how"] == "presigned"
        httpx.put(target["url"], content=data, headers=target["headers"]).raise_for_status()
        report = {"sha256": sha256, "size": len(data), "compile_seconds": 1.0}
        api.post(f"leases/{lease_id(number)}/publish", json=report).raise_for_status()
    return sha256


def fetched(url: str, key: str, number: int) -> bytes | str:
    """The NEFF of a key, or the state that was answered instead."""
    headers = {"authorization": f"Bearer {TOKEN}"}
    body = {"lease_id": lease_id(number), "holder": HOLDER}
    answer = httpx.post(f"{url}/v1/ns/main/keys/{key}/acquire", json=body, headers=headers, timeout=60).json()
    if answer["state"] != "hit":
        return str(answer["state"])
    there = httpx.get(f"{url}{answer['artifact']['url']}", headers=headers)
    if there.status_code != 307:
        return str(there.json()["code"])
    return httpx.get(there.headers["location"]).content


def test_doctor_finds_the_deployment_healthy(stack: Stack) -> None:
    done = stack.command("doctor", "--server", "--json", TORCH_NEURONX_NEFF_CACHE_DIR=tempfile.mkdtemp(dir="/tmp"))
    findings = json.loads(done.stdout)["findings"]
    assert done.returncode == 0, findings
    assert any("1 MiB up in" in f["text"] for f in findings)


def test_deployment_is_closed_to_whoever_has_no_token(stack: Stack) -> None:
    assert httpx.get(f"{stack.url}/v1/ns/main/entries").status_code == 401
    made = stack.command("token", "create", "train", "--role", "write", "--namespace", "main")
    assert made.returncode == 0, made.stderr
    published(stack.url, "1" * 64, neff("by token"), 1, made.stdout.strip())
    login = httpx.post(
        f"{stack.url}/login", json={"token": made.stdout.strip()}, headers={"x-forwarded-proto": "https"}
    )
    assert "Secure" in login.headers["set-cookie"]


def test_one_server_less_and_nobody_notices(stack: Stack) -> None:
    key = "2" * 64
    data = neff("survives")
    published(stack.url, key, data, 2)
    stack.servers["cache-a"].stop(9)
    for number in range(10, 14):
        assert fetched(stack.url, key, number) == data
    assert stack.command("gc", "--dry-run", **stack.environment).stdout.startswith("nothing to remove")
