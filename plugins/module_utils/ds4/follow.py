# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Follow work that goes on by itself on a host: ask, say what is new, tolerate an unreachable minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def follow(
    ask: Callable[[], dict[str, Any]],
    tell: Callable[[dict[str, Any]], None],
    *,
    lost: type[Exception],
    patience_seconds: float,
    limit_seconds: float,
    pause_seconds: float = 1.0,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    away: Callable[[float], None] = lambda seconds: None,
) -> dict[str, Any]:
    """Ask until the answer has no true ``running`` any more, and return it.

    Args:
        ask: one round trip; the work on the host does not depend on it.
        tell: receives every answer, to show what is new.
        lost: exception of a connection that is gone; the work goes on meanwhile.
        patience_seconds: how long the host may stay away in one piece; the exception is raised again after that.
        limit_seconds: total; the last answer is returned with ``running`` still true.
        away: told each time the host did not answer, with the seconds since it last did.
    """
    begun = seen = clock()
    while True:
        try:
            answer = ask()
        except lost:
            gone = clock() - seen
            if gone > patience_seconds:
                raise
            away(gone)
            sleep(pause_seconds)
            continue
        seen = clock()
        tell(answer)
        if not answer.get("running") or answer.get("failed") or seen - begun > limit_seconds:
            return answer
        sleep(pause_seconds)
