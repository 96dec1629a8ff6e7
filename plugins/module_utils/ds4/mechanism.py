# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Installs this very package on the host, so that systemd units can enter it with ``python3 -m ds4.<part>``.

Ansible ships to a host only what a module imports. The imports below, which are never executed, name every part; the
sources then come out of Ansible's own archive and need no copy task of their own.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pkgutil
import shutil
import tempfile
from typing import TYPE_CHECKING, NamedTuple

from .files import fsync_directory, is_ours, link_atomic, mark

if TYPE_CHECKING:
    from . import (  # noqa: F401
        accounts,
        adoption,
        assembly,
        build,
        catalogue,
        clients,
        command,
        deployment,
        door,
        errors,
        exchange,
        fetch,
        fetch_state,
        fetch_unit,
        files,
        findings,
        follow,
        foreign,
        gate,
        generations,
        gguf,
        gpu,
        guest,
        host,
        host_layout,
        journal,
        machine,
        masking,
        memory,
        pin,
        plan,
        policies,
        probe,
        process,
        profiles,
        progress,
        questions,
        records,
        rollout,
        rooms,
        service,
        serving_mode,
        serving_mode_apply,
        serving_mode_deadman,
        serving_mode_host,
        serving_mode_plan,
        serving_mode_reach,
        serving_mode_settings,
        serving_mode_snapshot,
        serving_mode_tell,
        serving_mode_units,
        settings,
        space,
        splice,
        staging,
        status,
        switch,
        systemd_text,
        toolkit,
        transaction,
        transfer,
        wanted,
        weights,
    )

CURRENT = "current"  # the link that units use: PYTHONPATH=<lib>/current
KEEP = 3  # versions: a transaction or a fetch that still runs may import from an older one


class Installed(NamedTuple):
    """``before`` and ``after``: what the link names, ``""`` for none; ``path``: folder for PYTHONPATH."""

    before: str
    after: str
    path: str

    @property
    def changed(self) -> bool:
        return self.before != self.after


def sources() -> dict[str, bytes]:
    """Name → content of every part, read from wherever this package was loaded from (a folder or Ansible's zip)."""
    package = importlib.import_module(str(__package__))
    names = ["__init__", *(module.name for module in pkgutil.iter_modules(package.__path__))]
    return {f"{name}.py": pkgutil.get_data(package.__name__, f"{name}.py") or b"" for name in names}


def version(parts: dict[str, bytes]) -> str:
    """First 12 hex digits of a hash over names and contents."""
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(f"{name}\0{len(parts[name])}\0".encode() + parts[name])
    return digest.hexdigest()[:12]


def install(lib: str, *, check: bool = False) -> Installed:
    """Make ``lib/current/ds4`` hold this package; older versions beyond the last few go.

    Args:
        lib: our folder for versions of the mechanism; it exists unless ``check``.
        check: only tell what would change.
    """
    parts = sources()
    wanted = version(parts)
    link = os.path.join(lib, CURRENT)
    before = os.readlink(link) if os.path.islink(link) else ""  # whole: one that leads elsewhere is another one
    folder = os.path.join(lib, wanted)
    intact = _holds(folder, parts)
    result = Installed(before if intact else "", wanted, link)
    if check or not result.changed:
        return result
    if not intact:
        _write(lib, folder, parts)
    link_atomic(wanted, link)
    _prune(lib, {wanted, before})
    return result


def _holds(folder: str, parts: dict[str, bytes]) -> bool:
    """True when every part is there, byte for byte: a half-written or edited version is written again."""
    try:
        for name, content in parts.items():
            with open(os.path.join(folder, "ds4", name), "rb") as stream:
                if stream.read() != content:
                    return False
    except OSError:
        return False
    return True


def _write(lib: str, folder: str, parts: dict[str, bytes]) -> None:
    temporary = tempfile.mkdtemp(dir=lib, prefix=".new-")
    try:
        os.chmod(temporary, 0o755)  # noqa: S103  (the service user imports from it)
        mark(temporary, "one version of the mechanism")
        package = os.path.join(temporary, "ds4")
        os.mkdir(package, 0o755)
        for name, content in parts.items():
            path = os.path.join(package, name)
            with open(path, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(path, 0o644)
        if is_ours(folder):  # the same version, damaged
            shutil.rmtree(folder)
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_directory(lib)


def _prune(lib: str, needed: set[str]) -> None:
    folders = [entry for entry in os.scandir(lib) if entry.is_dir(follow_symlinks=False) and is_ours(entry.path)]
    folders.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
    for entry in folders[KEEP:]:
        if entry.name not in needed:
            shutil.rmtree(entry.path)
