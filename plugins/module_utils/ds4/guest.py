# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Manners while somebody is being served: the lowest rank for processor and disk, and waiting while memory is short."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from .command import run
from .errors import Ds4Error
from .files import human_bytes
from .memory import read_meminfo, wait_for_available

LOOK_SECONDS = 1.0
SLACK = 1.02  # memory must be so far above the floor before a guest goes on


def step_back() -> None:
    """Lowest rank for the rest of this process, as the unit of the fetch has it."""
    os.nice(10)
    run(["ionice", "-c", "3", "-p", str(os.getpid())])


class Patience:
    """Waits while the host is short of memory.

    Args:
        floor_kib: MemAvailable below which nothing is read; 0: never wait.
        limit_seconds: longest wait in all; 0: no limit.
        note: called with one sentence when a wait begins and ends.
    """

    def __init__(
        self, floor_kib: int, limit_seconds: float = 0.0, note: Callable[[str], None] = lambda text: None
    ) -> None:
        self._floor = floor_kib
        self._limit = limit_seconds
        self._note = note
        self._looked = 0.0
        self._waited = 0.0

    def wait(self) -> None:
        """Go on at once, or as soon as there is memory; may be called for every read.

        Raises:
            Ds4Error: the limit is over.
        """
        if not self._floor or time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        available = read_meminfo()["MemAvailable"]
        if available >= self._floor:
            return
        short = f"MemAvailable {human_bytes(available * 1024)} is below the floor {human_bytes(self._floor * 1024)}"
        self._note(f"pausing: {short}")
        left = self._limit - self._waited if self._limit else float("inf")
        waited = wait_for_available(int(self._floor * SLACK), left)
        self._waited += waited.seconds
        if not waited.reached:
            raise Ds4Error(
                "There was no memory for reading weights beside the engine",
                found=f"{short}, for {self._waited:.0f} s",
                required="more than weights_memory_floor_gib",
                cure="free memory, or lower weights_memory_floor_gib; then run again",
            )
        self._note("going on: there is memory again")
