"""A stand-in hub for the random tests of the fetcher, and what every one of its ends must look like."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.fetching import Fetcher, Finished
from lab.hub import Hub, weights

MIB = weights.MIB
SIZES = {"base": 12 * MIB, "drafter": 3 * MIB, "mtp": 64 * MIB}
MEMORY_LIMIT_KIB = 64 * 1024
WIRE_LIMIT = 1.2  # × size, wherever the transfer can be resumed


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seeds = int(os.environ.get("FAULT_SEEDS", "3"))
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(seeds))
    if "few_seeds" in metafunc.fixturenames:  # for tests that are multiplied by other parameters already
        metafunc.parametrize("few_seeds", range(max(1, seeds // 10)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.faults)


@pytest.fixture(scope="session")
def manifest() -> dict[str, dict[str, dict[str, Any]]]:
    return weights.manifest(SIZES)


@pytest.fixture(scope="session")
def hub_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    weights.write(str(root), SIZES)
    return root


# A small send buffer keeps what an ended connection wastes below what the tests measure.
HUB_OPTIONS = {"send_buffer": 65536}


@pytest.fixture(scope="session")
def running_hub(hub_root: Path) -> Iterator[Hub]:
    with Hub(hub_root, options=HUB_OPTIONS) as hub:
        yield hub


@pytest.fixture(scope="session")
def running_tls_hub(hub_root: Path) -> Iterator[Hub]:
    with Hub(hub_root, tls=True, options=HUB_OPTIONS) as hub:
        yield hub


@pytest.fixture
def loop_disk() -> Iterator[Callable[[Path, int], Path]]:
    """Mounts an ext4 file system of some MiB from an image file (made when it is absent); needs root."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a file system")
    mounted: list[Path] = []

    def make(image: Path, mib: int) -> Path:
        if not image.exists():
            with image.open("wb") as stream:
                stream.truncate(mib * MIB)
            subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True, capture_output=True)
        point = Path(f"{image}.mounted")
        point.mkdir()
        subprocess.run(["mount", "-o", "loop", image, point], check=True)
        mounted.append(point)
        return point

    yield make
    for point in reversed(mounted):
        subprocess.run(["umount", "-l", point], check=True)


@pytest.fixture
def hub(running_hub: Hub) -> Hub:
    running_hub.reset()
    return running_hub


@pytest.fixture
def tls_hub(running_tls_hub: Hub) -> Hub:
    running_tls_hub.reset()
    return running_tls_hub


@pytest.fixture
def base(tmp_path: Path, hub: Hub, manifest: dict[str, dict[str, dict[str, Any]]]) -> Callable[..., Fetcher]:
    """Makes a fetcher of the 0731 base."""

    def make(**settings: Any) -> Fetcher:
        return Fetcher(tmp_path, hub, {"base": manifest["0731"]["base"]}, **settings)

    return make


@pytest.fixture
def large(tmp_path: Path, hub: Hub, manifest: dict[str, dict[str, dict[str, Any]]]) -> Callable[..., Fetcher]:
    """Makes a fetcher of a file so large that what a crash costs (0.2 s of work, begun segments) is small beside it."""

    def make(folder: Path = tmp_path, **settings: Any) -> Fetcher:
        return Fetcher(folder, hub, {"mtp": manifest["legacy"]["mtp"]}, **settings)

    return make


def judge(fetcher: Fetcher, finished: Finished, *, wire_limit: float | None = WIRE_LIMIT, role: str = "base") -> None:
    """What must hold however a run ends: the right file or a clear failure, never a wrong file."""
    wanted = next(item for item in fetcher.plan.files if item.role == role)
    found = fetcher.sha256(role)
    assert found in {"", wanted.sha256}, f"a wrong file under the final name\n{finished.text}"
    assert "Traceback" not in finished.text, finished.text
    assert finished.rc in {0, 2, 75}, finished
    assert finished.peak_kib <= MEMORY_LIMIT_KIB, f"peak {finished.peak_kib} KiB"
    assert fetcher.control.stats()["tokens"]["cdn"] == 0, "a token reached the CDN"
    status = fetcher.status()
    if finished.rc == 0:
        assert found == wanted.sha256, f"no file under the final name\n{finished.text}"
        assert status["state"] == "done"
        record = json.loads((fetcher.directory / f"{wanted.target}.record.json").read_text())
        stat = fetcher.path(role).stat()
        assert (record["sha256"], record["bytes"], record["mtime_ns"], record["inode"]) == (
            found,
            stat.st_size,
            stat.st_mtime_ns,
            stat.st_ino,
        )
        assert fetcher.leftovers() == []
        if wire_limit is not None:
            assert fetcher.wire_bytes() <= wire_limit * sum(item.bytes or 0 for item in fetcher.plan.files)
    else:
        assert not found or role != "base", "failed although the file is there"
        assert status["state"] == "failed"
        error = status["error"]
        assert error["what"], status
        assert error["cure"], status
        assert error["what"] in finished.text
        assert "Cure: " in finished.text
