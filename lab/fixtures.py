"""pytest fixtures over the lab: ``from lab.fixtures import borrowed, lab_session, spark, sparks`` in a conftest.py.

One instance serves a whole test session; each test gets clean hosts of it. On a machine that cannot run the lab the tests
are skipped with the reason, never passed. Two sessions at once use two instances.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from . import hosts, services, system
from .api import Host, Lab

SESSIONS = 16  # test sessions at once
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Remember whether a test failed, for the fixtures' teardown."""
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(scope="session")
def lab_session() -> Iterator[Lab]:
    """The instance of this test session, with one host; taken down at its end."""
    try:
        system.require()
    except system.LabError as error:
        pytest.skip(f"not run: {error}")
    for number in range(1, SESSIONS + 1):
        with contextlib.ExitStack() as stack:
            try:
                # Dies with this process: the instance of a crashed session is found free, and cleaned by up().
                stack.enter_context(system.lock(f"pytest-{number}", wait=False))
            except BlockingIOError:
                continue
            lab = Lab(f"pytest-{number}")
            stack.callback(lab.down)
            yield lab.up(1, replace=True)
            return
    pytest.fail(f"{SESSIONS} test sessions run already")


@pytest.fixture
def sparks(lab_session: Lab, request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Host]]]:
    """``sparks(n, **options)`` gives n clean, booted hosts, and an inventory of exactly these.

    ``options`` are those of lab.hosts.HostOptions, ``per_host={"spark2": {...}}`` for single ones. Hub and engine
    repository are as new. When the test fails, the end of each host's journal is shown.
    """
    given: list[Host] = []

    def give(count: int, *, per_host: dict[str, dict[str, Any]] | None = None, **options: Any) -> list[Host]:
        lab_session.grow(count)
        services.renew(lab_session.directory)
        for host in lab_session.hosts[count:]:
            host.power_off()
        wanted = lab_session.hosts[:count]
        for host in wanted:
            host_options = hosts.HostOptions(**{**options, **(per_host or {}).get(host.name, {})})
            if host.leader is None or host.used or dataclasses.asdict(host_options) != dataclasses.asdict(host.options):
                host.reset(options=host_options, wait=False)
            host.used = True
        for host in wanted:
            host.wait_ready(clean=True)
        lab_session.write_inventory(wanted)
        given[:] = wanted
        return wanted

    yield give
    if request.node.stash.get(FAILED, False):
        for host in given:
            print(f"\n--- the journal of {host.name} ends with")
            print(
                host.run(["journalctl", "--no-pager", "-n", "60"], check=False).out if host.leader else "(it is down)"
            )


@pytest.fixture
def borrowed(lab_session: Lab) -> Host:
    """A clean booted host for tests that leave it as it was but for GPU, memory and /tmp: it serves many without a reset."""
    host = lab_session.hosts[0]
    if host.leader is None or host.used or dataclasses.asdict(host.options) != dataclasses.asdict(hosts.HostOptions()):
        host.reset(options=hosts.HostOptions())
    lab_session.write_inventory([host])
    host.gpu()
    host.memory()
    return host


@pytest.fixture
def spark(sparks: Callable[..., list[Host]]) -> Host:
    """One clean, booted host; ``spark.lab`` is its instance."""
    return sparks(1)[0]
