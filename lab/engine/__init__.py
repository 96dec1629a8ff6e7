# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The stand-in engine: a git repository made at run time, served over HTTP, that builds into programs like the real ones.

``source/`` is what the repository holds. Every tag differs by ``VERSION`` and ``standin/release.json``, which also names
the fault that a ``bad-…`` tag carries; build faults are edits of the Makefile or of the kernel.

A running program meets the lab at two directories of the guest, both mode 1777 and on tmpfs:

``/run/lab-tenants``
    memory it holds, for the lab's memory simulator (the format is told in lab/memory.py). A file named by the pid; with the
    fault ``hold_memory_seconds`` a file ``held-PID`` stays behind.
``/run/lab-engine``
    ``PROGRAM-PID.json``: argv, environment and weights of each start; ``overcommit-PID.json``: a start that would have
    frozen a real Spark. ``faults.json``, written by tests and read at every request: see ``FAULTS``.

Both must be writable inside hardened units. The programs run Python inside their own process, so a guest needs the
package libpython3.x of its Python.
"""

from __future__ import annotations

import subprocess

from .repository import BAD, FAULTS, GOOD, make_repo, releases, write_inventory
from .serve import Server

__all__ = ["BAD", "FAULTS", "GOOD", "Server", "make_repo", "releases", "runs_here", "write_inventory"]


def runs_here(python: str = "python3") -> bool:
    """True when this machine has the shared library of ``python``, without which the programs do not start."""
    code = (
        "import ctypes, os, sysconfig as s; name = s.get_config_var('INSTSONAME')\n"
        "try: ctypes.CDLL(name)\nexcept OSError: ctypes.CDLL(os.path.join(s.get_config_var('LIBDIR'), name))"
    )
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
