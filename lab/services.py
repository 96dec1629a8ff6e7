"""What stands beside the hosts of an instance: the stand-in hub and the stand-in engine's repository, on its bridge address.

Both are child processes of the instance: started by ``up``, ended by ``down``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import sys
from typing import NamedTuple

from . import engine, hub, image, system
from .hub import weights

HUB_PORT, CDN_PORT, PROXY_PORT, ENGINE_PORT = 8080, 8082, 3128, 8081


class Engine(NamedTuple):
    """The stand-in engine's repository.

    Attributes:
        url: what ``git clone`` wants.
        repository: the bare repository, the instance's own (tests may move its tags).
    """

    url: str
    repository: str


def hub_url(gateway: str) -> str:
    """What HF_ENDPOINT must be on the hosts."""
    return f"http://{gateway}:{HUB_PORT}"


def engine_url(gateway: str) -> str:
    """What the hosts clone."""
    return f"http://{gateway}:{ENGINE_PORT}/ds4.git"


def weights_directory() -> str:
    """The lab's weights as ``OWNER/NAME/REVISION/FILE``; cached, shared by all instances, read-only."""

    def make(path: str) -> None:
        weights.write(path)

    return image.cached("weights", system.read(os.path.join(system.REPOSITORY, "lab/hub/weights.py")), make)


def start(instance: str, directory: str, gateway: str) -> None:
    """Start both, and wait until they answer."""
    root = os.path.join(directory, "hub")
    system.run(["cp", "-a", "--reflink=auto", weights_directory(), root])
    _spawn(
        instance,
        directory,
        "hub",
        [
            *("lab.hub", "serve", "--root", root, "--address", gateway, "--port", str(HUB_PORT)),
            *("--cdn-port", str(CDN_PORT), "--proxy-port", str(PROXY_PORT)),
        ],
    )
    repository = repository_path(directory)
    shutil.copytree(_engine_repository(), repository, symlinks=True)
    arguments = ["lab.engine", "serve", repository, "--address", gateway, "--port", str(ENGINE_PORT)]
    _spawn(instance, directory, "engine", arguments)
    control(directory)


def renew(directory: str) -> None:
    """Both as they were at the start: no faults, no options, an empty log, all tags in place."""
    control(directory).reset()
    repository = repository_path(directory)
    shutil.rmtree(repository)
    shutil.copytree(_engine_repository(), repository, symlinks=True)


def repository_path(directory: str) -> str:
    """The instance's own bare repository."""
    return os.path.join(directory, "engine", "ds4.git")


def control(directory: str) -> hub.Control:
    """The handle of the instance's hub."""
    path = os.path.join(directory, "hub.log")

    def first_line() -> str:
        line = system.read(path).partition("\n")[0] if os.path.exists(path) else ""
        return line if line.endswith("}") else ""

    line = system.wait(first_line, f"The stand-in hub serves (its messages: {path})", timeout=20)
    return hub.Control(json.loads(line)["control_url"])


@functools.cache
def _engine_repository() -> str:
    source = os.path.join(system.REPOSITORY, "lab", "engine")
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(source):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            digest.update(f"{folder}/{name}\0{system.read(os.path.join(folder, name))}\0".encode())

    def make(path: str) -> None:
        engine.make_repo(path)

    return image.cached("engine", digest.hexdigest(), make)


def _spawn(instance: str, directory: str, name: str, arguments: list[str]) -> None:
    system.spawn(
        [sys.executable, "-m", *arguments],
        group=system.cgroup(instance, name),
        log=os.path.join(directory, f"{name}.log"),
    )
