"""Deployment files say what is true of the code, and hold no secret that works."""

from __future__ import annotations

import configparser
import re
import shlex
from typing import Any

import pytest
import yaml
from neffcache_client.cli.main import COMMANDS
from neffcache_server.app import create_app
from neffcache_server.settings import PREFIX, ServerSettings
from support.compose import ROOT, VariableMissing, compose, dotenv_example, variables_in_use

KNOWN = {PREFIX + name.upper() for name in ServerSettings.model_fields}
FILLED = dict.fromkeys(dotenv_example(), "x" * 24)


def ours(names: Any) -> set[str]:
    return {name for name in names if name.startswith("NEFFCACHE_")}


def test_compose_starts_nothing_without_its_secrets() -> None:
    required = {name for name, kind in variables_in_use().items() if kind == "?"}
    assert {"CACHE_ADMIN_TOKEN", "POSTGRES_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY"} <= required
    for name in required:
        with pytest.raises(VariableMissing, match=name):
            compose({**FILLED, name: ""})


def test_the_example_names_every_variable_and_gives_away_no_secret() -> None:
    example = dotenv_example()
    assert set(example) == set(variables_in_use())
    assert {name for name, value in example.items() if value} == {"CACHE_PORT", "S3_PORT"}
    assert "/.env" in (ROOT / ".gitignore").read_text().splitlines()


def test_compose_services_are_watched_and_use_settings_that_exist() -> None:
    services = compose(FILLED)
    for name, service in services.items():
        assert ours(service.get("environment", {})) <= KNOWN, name
        if service.get("restart") != "no" and "build" not in service:
            assert service["healthcheck"]["test"], name
        if "build" in service:
            assert service["command"][0] in COMMANDS, name
    volumes = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["volumes"]
    mounted = {v.partition(":")[0] for s in services.values() for v in s.get("volumes", ()) if ":" in v}
    assert {m for m in mounted if not m.startswith(".")} == set(volumes)
    servers = [name for name, s in services.items() if s.get("command") == ["serve"]]
    proxied = re.findall(
        r"^    server \w+ ([\w-]+):8765$", (ROOT / "deploy" / "haproxy.cfg").read_text(), re.MULTILINE
    )
    assert servers == proxied


def test_image_runs_as_nobody_special_and_is_watched() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert "USER 10001" in lines
    assert any(line.startswith("HEALTHCHECK") for line in lines)
    assert lines[-2:] == ['ENTRYPOINT ["neffcache"]', 'CMD ["serve"]']
    assert ours(re.findall(r"(NEFFCACHE_\w+)=", "\n".join(lines))) <= KNOWN
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored, source


def test_systemd_unit_runs_commands_that_exist() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # keys of units are case-sensitive
    unit.read(ROOT / "deploy" / "neffcache.service")
    service = unit["Service"]
    for name in ("ExecStart", "ExecStartPre"):
        program, command, *_ = shlex.split(service[name])
        assert program.endswith("/neffcache")
        assert command in COMMANDS
    assert ours(re.findall(r"(NEFFCACHE_\w+)=", (ROOT / "deploy" / "neffcache.service").read_text())) <= KNOWN
    assert service["DynamicUser"] == "yes"


def test_kubernetes_manifest_probes_routes_and_sets_variables_that_exist() -> None:
    text = (ROOT / "deploy" / "kubernetes.yaml").read_text()
    documents = {d["kind"]: d for d in yaml.safe_load_all(text)}
    assert ours(documents["ConfigMap"]["data"]) <= KNOWN
    assert ours(re.findall(r"(NEFFCACHE_\w+)=", text)) <= KNOWN
    pod = documents["Deployment"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    paths = create_app(ServerSettings()).openapi()["paths"]
    (server,), (migrate,) = pod["containers"], pod["initContainers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert server[probe]["httpGet"]["path"] in paths
    assert (server["args"][0], migrate["args"]) == ("serve", ["db", "upgrade"])
    grace = ServerSettings().shutdown_seconds + server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > grace
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert server["image"] == migrate["image"] == f"neffcache:{version[1]}"
