"""Fixtures that every test gets."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from support import backends
from support.postgres import Postgres, running_postgres
from support.s3 import S3, running_s3

# A busy machine is no finding: neither a slow example nor slow drawing fails a test.
hypothesis_settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("suite")

_OURS = ("NEFFCACHE_", "TORCH_NEURONX_", "NEURON_")
_JOBS = ("RANK", "LOCAL_RANK", "SLURM_JOB_ID", "SLURM_PROCID", "TORCHELASTIC_RUN_ID", "XLA_FLAGS")


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """No test sees the developer's own cache settings, and none leaks its own."""
    saved = dict(os.environ)
    for name in list(os.environ):
        if name.startswith(_OURS) or name in _JOBS:
            del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(saved)


def pytest_configure(config: pytest.Config) -> None:
    # Who starts the tests in the background may have them ignored, and every process that a test starts with them:
    # then none of those could be stopped.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for marker in (
        "embedded: breaks SQLite or the blob folder by hand, so it runs on that backend alone",
        "production: the fault is one of PostgreSQL or S3, so it runs on that backend alone",
        "one_backend(why): no server, or nothing that a server keeps, has a part in it, so SQLite and a folder do",
    ):
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def elsewhere(item: pytest.Item) -> bool:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            return False
        if why := item.get_closest_marker("one_backend"):
            assert why.args, f"{item.nodeid}: one_backend wants a reason"
        backend = item.callspec.params.get("backend")
        other = ("production",) if backend == "sqlite+folder" else ("embedded", "one_backend")
        return backend is not None and any(item.get_closest_marker(name) is not None for name in other)

    dropped = [item for item in items if elsewhere(item)]
    items[:] = [item for item in items if item not in set(dropped)]
    config.hook.pytest_deselected(items=dropped)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL for the whole run; databases are taken and given back."""
    with running_postgres() as running:
        yield running


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """An object store with one bucket for the whole run."""
    with running_s3() as running:
        yield running


@pytest.fixture(scope="module", params=backends.NAMES)
def backend(request: pytest.FixtureRequest) -> Iterator[backends.Embedded]:
    """Servers of the module's tests keep their state there; each test runs once with each."""
    if request.param == "sqlite+folder":
        chosen = backends.Embedded()
    else:
        chosen = backends.Production(request.getfixturevalue("postgres"), request.getfixturevalue("s3"))
    with backends.using(chosen):
        yield chosen
