"""What a person reads about a fetch."""

from __future__ import annotations

from typing import Any

import pytest

from ds4 import progress

GIB = 1024**3
BASE = {"role": "base", "state": "fetching", "bytes": 86720111488, "done": int(36.5 * GIB), "hashed": 0}
DRAFTER = {"role": "drafter", "state": "waiting", "bytes": 6971241504, "done": 0, "hashed": 0}


def status(**changes: Any) -> dict[str, Any]:
    return {
        "state": "running",
        "files": [BASE, DRAFTER],
        "rate_bytes_per_second": 612 * 1024**2,
        "detail": "",
        **changes,
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (status(), "base 45 %  36.5/80.8 GiB  612 MiB/s  eta 1m25s"),
        (status(rate_bytes_per_second=int(1.5 * 1024**2)), "base 45 %  36.5/80.8 GiB  1.5 MiB/s  eta 9h37m"),
        (status(rate_bytes_per_second=0), "base 45 %  36.5/80.8 GiB  0.0 MiB/s"),
        (status(state="paused", detail="MemAvailable 1.0 GiB is below the floor 2.0 GiB"),
         "base 45 %  36.5/80.8 GiB  paused: MemAvailable 1.0 GiB is below the floor 2.0 GiB"),
        (status(files=[{**BASE, "state": "verifying", "hashed": GIB}]), "base verifying 1 %  1.0/80.8 GiB"),
        (status(files=[{**BASE, "bytes": None}]), "base asking for its size"),
        (status(files=[{**BASE, "bytes": 24 << 20, "done": 12 << 20}], rate_bytes_per_second=1 << 20),
         "base 50 %  12.0/24.0 MiB  1.0 MiB/s  eta 12s"),
        (status(files=[DRAFTER]), "starting"),
        (status(state="done"), "done"),
        (status(state="failed", detail="x could not be fetched"), "failed: x could not be fetched"),
        ({}, "no fetch has been started"),
    ],
)  # fmt: skip
def test_line(value: dict[str, Any], text: str) -> None:
    assert progress.line(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (72, "1m12s"), (3599, "59m59s"), (4000, "1h06m"), (-3, "0s")],
)
def test_duration(seconds: float, text: str) -> None:
    assert progress.duration(seconds) == text
