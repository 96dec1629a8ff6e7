"""The root file system that all simulated Sparks share, read-only, in three layers.

- *base*: Debian packages, made by mmdebstrap once and cached by a hash of the recipe below;
- *guest*: the files of lab/guest plus the simulated desktop units; cached by a hash of both;
- *toolkit*: a real CUDA 13.0 compiler and cuobjdump, from this machine or from the Python package index.

Every host lays a writable directory of its own over base and guest (lab/hosts.py).
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable

from . import desktop, emulation, system

SUITE = "bookworm"
MIRROR = os.environ.get("DS4_LAB_MIRROR", "http://deb.debian.org/debian")
# Debian packages of the hosts: what a stock DGX OS (Ubuntu 24.04 and NVIDIA's additions) has that the product or its tests touch.
PACKAGES = system.read(os.path.join(os.path.dirname(os.path.abspath(__file__)), "packages.txt")).split()
# Kept in the hosts as a local package source, since they have no Internet: a removed one can be installed again.
SPARE_PACKAGES = ["acl", "curl", "git", "make", "nftables", "python3-requests"]
SPARE_DIR = "/srv/lab-apt"

CUDA_VERSION = "13.0"
CUDA_HOME = f"/usr/local/cuda-{CUDA_VERSION}"
# The same compiler as wheels, for machines without the toolkit.
TOOLKIT_WHEELS = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
]
CUOBJDUMP_WHEEL = "nvidia-cuda-cuobjdump==13.2.51"
RECIPE = 1


def layers(architecture: str = "") -> list[str]:
    """Directories to stack for a host, uppermost first (overlayfs order); made when missing.

    Args:
        architecture: Debian's name of it; empty for this machine's own.
    """
    return [guest(), base(architecture)]


def base(architecture: str = "") -> str:
    """The cached Debian root file system."""
    recipe = json.dumps([RECIPE, SUITE, PACKAGES, SPARE_PACKAGES, *([architecture] if architecture else [])])
    return cached("base", recipe, lambda path: _make_base(path, architecture))


def guest() -> str:
    """The layer of lab files over the base."""
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guest")
    content = [system.read(os.path.join(system.REPOSITORY, "lab", name)) for name in ("image.py", "desktop.py")]
    content.append(system.tree_digest(source))
    return cached("guest", "\0".join(content), lambda path: _make_guest(source, path))


def toolkit(architecture: str = "") -> list[str]:
    """Directories that together are the CUDA toolkit, uppermost first."""
    parts = [architecture] if architecture else []

    def wheels(kind: str, names: list[str]) -> str:
        recipe = json.dumps([*parts, *names]) if parts or len(names) > 1 else names[0]
        return cached(kind, recipe, lambda path: _unpack_wheels(names, path, architecture))

    extra = wheels("cuobjdump", [CUOBJDUMP_WHEEL])
    if not architecture and os.access(os.path.join(CUDA_HOME, "bin", "nvcc"), os.X_OK):
        return [extra, CUDA_HOME]
    return [extra, wheels("toolkit", TOOLKIT_WHEELS)]


def cached(kind: str, recipe: str, make: Callable[[str], None]) -> str:
    """Directory ``kind``-<hash of the recipe> in the cache; ``make`` fills a fresh one, published by rename."""
    path = os.path.join(system.CACHE_DIR, f"{kind}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}")
    if os.path.isdir(path):
        return path
    with system.lock(kind):
        if os.path.isdir(path):
            return path
        for leftover in [name for name in os.listdir(system.CACHE_DIR) if name.startswith(f".{kind}-")]:
            shutil.rmtree(os.path.join(system.CACHE_DIR, leftover))
        partial = tempfile.mkdtemp(prefix=f".{kind}-", dir=system.CACHE_DIR)
        os.chmod(partial, 0o755)
        try:
            make(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        os.rename(partial, path)
    return path


def prune(used: list[str]) -> list[str]:
    """Remove everything of the cache but ``used`` and what a running host stands on; returns what was removed."""
    needed = set(used)
    for script in glob.glob(os.path.join(system.STATE_DIR, "*", "hosts", "*", "boot.sh")):
        text = system.read(script)
        needed |= {path for path in _entries() if path in text}
    removed = [path for path in _entries() if path not in needed]
    for path in removed:
        shutil.rmtree(path)
    return removed


def _entries() -> list[str]:
    return sorted(path for path in glob.glob(os.path.join(system.CACHE_DIR, "*-*")) if os.path.isdir(path))


def _make_base(path: str, architecture: str = "") -> None:
    about = f"{architecture} under emulation, about 5 minutes" if architecture else "about 1 minute"
    print(f"lab: making the base image (Debian packages, {about}, once)", file=sys.stderr, flush=True)
    fetch = (
        f'mkdir -p "$1{SPARE_DIR}" && cd "$1{SPARE_DIR}" && chroot "$1" sh -c '
        f"'cd {SPARE_DIR} && apt-get -o APT::Sandbox::User=root download {' '.join(SPARE_PACKAGES)}'"
    )
    system.run(
        [
            *("mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", '--aptopt=Acquire::Languages "none"'),
            *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale", "info")),
            f"--include={','.join(PACKAGES)}",
            *([f"--architectures={architecture}"] if architecture else []),
            f"--customize-hook={fetch}",
            *(SUITE, path, MIRROR),
        ],
        timeout=1800,
    )
    system.write(os.path.join(path, "etc/apt/sources.list"), f"deb [trusted=yes] file:{SPARE_DIR} ./\n")
    system.write(
        os.path.join(path, SPARE_DIR.lstrip("/"), "Packages"), _package_index(os.path.join(path, SPARE_DIR[1:]))
    )
    system.run(["chroot", path, "apt-get", "-q", "update"])


def _package_index(directory: str) -> str:
    """Text of a Packages file for the .deb files in ``directory`` (dpkg-scanpackages would need dpkg-dev)."""
    stanzas = []
    for name in sorted(os.listdir(directory)):
        if not name.endswith(".deb"):
            continue
        file = os.path.join(directory, name)
        control = system.run(["dpkg-deb", "--field", file]).out.strip()
        with open(file, "rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        stanzas.append(f"{control}\nFilename: ./{name}\nSize: {os.path.getsize(file)}\nSHA256: {digest}\n")
    return "\n".join(stanzas)


def _make_guest(source: str, path: str) -> None:
    shutil.copytree(source, path, symlinks=True, dirs_exist_ok=True)
    # Whatever umask the checkout was made with.
    for directory, _, names in os.walk(path):
        os.chmod(directory, 0o755)
        for name in names:
            os.chmod(os.path.join(directory, name), 0o755 if directory.endswith("/bin") else 0o644)
    desktop.install(path)
    wanted = os.path.join(path, "etc/systemd/system/{}.wants")
    for target, unit, where in [
        ("sysinit.target", "lab-mounts.service", "/etc/systemd/system"),
        ("multi-user.target", "systemd-networkd.service", "/lib/systemd/system"),
    ]:
        os.makedirs(wanted.format(target), exist_ok=True)
        os.symlink(f"{where}/{unit}", os.path.join(wanted.format(target), unit))
    for unit in (
        "console-getty.service",
        "systemd-firstboot.service",
        *(f"systemd-ask-password-{to}.path" for to in ("console", "wall")),
    ):
        os.symlink("/dev/null", os.path.join(path, "etc/systemd/system", unit))
    # The drop-in for all services gives each a mount namespace of its own; mounts made by these must be seen by all.
    for unit in ("lab-mounts.service", "ssh.service", "user@.service", "user-runtime-dir@.service"):
        os.makedirs(os.path.join(path, "etc/systemd/system", f"{unit}.d"))
        os.symlink("/dev/null", os.path.join(path, "etc/systemd/system", f"{unit}.d", "10-lab.conf"))
    os.makedirs(os.path.join(path, "usr/local"), exist_ok=True)
    os.makedirs(os.path.join(path, CUDA_HOME.lstrip("/")))
    os.symlink(os.path.basename(CUDA_HOME), os.path.join(path, "usr/local/cuda"))


def _unpack_wheels(wheels: list[str], path: str, architecture: str = "") -> None:
    if system.run([sys.executable, "-m", "pip", "--version"], check=False).rc != 0:
        raise system.LabError(
            f"{sys.executable} has no pip, which fetches {', '.join(wheels)}. Cure: make venv, then .venv/bin/python3 -m lab …"
        )
    print(f"lab: fetching {', '.join(wheels)} from the Python package index", file=sys.stderr, flush=True)
    foreign = []
    if architecture:
        foreign = ["--only-binary=:all:", *(f"--platform={name}" for name in emulation.named(architecture).wheels)]
    with tempfile.TemporaryDirectory() as downloads:
        system.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", downloads, *foreign, *wheels],
            timeout=1200,
        )
        unpacked = os.path.join(downloads, "unpacked")
        for name in sorted(os.listdir(downloads)):
            with zipfile.ZipFile(os.path.join(downloads, name)) as archive:
                archive.extractall(unpacked)
        shutil.copytree(os.path.join(unpacked, "nvidia", "cu13"), path, symlinks=True, dirs_exist_ok=True)
    for directory, _, names in os.walk(os.path.join(path, "bin")):
        for name in names:
            os.chmod(os.path.join(directory, name), 0o755)
    nvvm = os.path.join(path, "nvvm", "bin", "cicc")
    if os.path.exists(nvvm):
        os.chmod(nvvm, 0o755)
    if os.path.isdir(os.path.join(path, "lib")) and not os.path.exists(os.path.join(path, "lib64")):
        os.symlink("lib", os.path.join(path, "lib64"))
