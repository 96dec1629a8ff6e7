"""Following a host: every answer is told once, an unreachable minute is survived, a lost host is not waited for endlessly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ds4.follow import follow


class LostError(Exception):
    pass


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def run(answers: list[Any], **limits: float) -> tuple[dict[str, Any], list[Any], list[float]]:
    clock = Clock()
    told: list[Any] = []
    away: list[float] = []
    rest: Iterator[Any] = iter(answers)

    def ask() -> dict[str, Any]:
        answer = next(rest)
        clock.now += 1
        if answer is LostError:
            raise LostError
        return dict(answer)

    given = {"patience_seconds": 10.0, "limit_seconds": 100.0, **limits}
    result = follow(ask, told.append, lost=LostError, sleep=clock.sleep, clock=clock, away=away.append, **given)
    return result, told, away


def test_it_ends_with_the_work() -> None:
    result, told, _away = run([{"running": True, "n": 1}, {"running": False, "n": 2}])
    assert result["n"] == 2
    assert [answer["n"] for answer in told] == [1, 2]


def test_a_failure_ends_it() -> None:
    assert run([{"running": True, "failed": True}])[0]["failed"]


def test_an_unreachable_minute_is_survived_and_said() -> None:
    result, _told, away = run([{"running": True}, LostError, LostError, LostError, {"running": False}])
    assert result == {"running": False}
    assert away == [2.0, 4.0, 6.0]  # a second to ask and a second's pause each, since the last answer


def test_patience_is_for_one_absence_not_for_all_together() -> None:
    answers = ([{"running": True}] + [LostError] * 3) * 5 + [{"running": False}]
    assert run(answers)[0] == {"running": False}


def test_a_host_that_stays_away_is_given_up() -> None:
    with pytest.raises(LostError):
        run([{"running": True}] + [LostError] * 50)


def test_the_limit_bounds_all_of_it() -> None:
    result, told, _away = run([{"running": True}] * 100, limit_seconds=10.0)
    assert result["running"]
    assert len(told) < 10
