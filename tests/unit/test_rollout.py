"""Who is switched when: batches as Ansible forms them, a canary that is never empty, and when it ends early."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from ds4.rollout import batch_numbers, halt, plan


@pytest.mark.parametrize(
    ("count", "batches", "numbers"),
    [
        (0, [1], []),
        (1, [1, "25%", "100%"], [1]),
        (4, [1, "25%", "100%"], [1, 2, 3, 3]),
        (8, [1, "25%", "100%"], [1, 2, 2, 3, 3, 3, 3, 3]),
        (3, [1], [1, 2, 3]),
        (3, [2, "10%"], [1, 1, 2]),
        (2, ["100%"], [1, 1]),
        (2, [], [1, 1]),
    ],
)
def test_batches(count: int, batches: list[Any], numbers: list[int]) -> None:
    assert batch_numbers(count, batches) == numbers


def host(*, needs: bool = True, drained: bool = False, obstacles: str = "") -> dict[str, Any]:
    staged = {"release": "v0.6.5", "needs_switch": needs, "reasons": ["it runs v0.6.4"]}
    return {"staged": staged, "drained": drained, "obstacles": obstacles}


def test_every_host_is_told_why_it_is_or_is_not_switched() -> None:
    names = ["a", "b", "c", "d", "e", "f", "g"]
    facts = {
        "a": host(drained=True),
        "b": host(needs=False),
        "c": host(obstacles="The engine of alice runs"),
        "d": {"staged": None},
        "f": host(),
        "g": host(),
    }
    made = plan(names, [name for name in names if name != "e"], facts, [1, "100%"])
    assert made["switch"] == ["f", "g"], "the canary is the first host that is really switched"
    assert {name: row["state"] for name, row in made["rows"].items()} == {
        "a": "skipped",
        "b": "ok",
        "c": "failed",
        "d": "skipped",
        "e": "failed",
        "f": "planned",
        "g": "planned",
    }
    assert "batch 1 of 2, the canary" in made["rows"]["f"]["text"]
    assert "batch 2 of 2: it runs v0.6.4" in made["rows"]["g"]["text"]
    assert made["rows"]["c"]["text"] == "not switched: The engine of alice runs"
    assert "absent" in made["rows"]["e"]["text"]
    assert made["text"].splitlines()[:3] == ["Rollout: 2 of 7 host(s) to switch", "  batch 1: f", "  batch 2: g"]
    assert "  f: it runs v0.6.4" in made["text"].splitlines()


def test_an_empty_rollout_is_said() -> None:
    made = plan(["a"], ["a"], {"a": host(needs=False)}, [1])
    assert made["switch"] == []
    assert made["text"].startswith("Rollout: no host is to be switched\n  a: serves v0.6.5 already")


def test_one_host_is_no_canary() -> None:
    assert "canary" not in plan(["a"], ["a"], {"a": host()}, [1, "100%"])["text"]


@pytest.mark.parametrize(
    ("batch", "outcomes", "allowed", "says"),
    [
        (["a"], {}, 0, ""),
        (["b", "c"], {"a": "proven"}, 0, ""),
        (["b", "c"], {}, 0, "a failed or was lost in an earlier batch"),
        (["d"], {"a": "proven", "c": "proven"}, 0, "b failed or was lost in an earlier batch"),
        (
            ["d"],
            {"a": "proven", "c": "proven"},
            49,
            "b failed or was lost in an earlier batch (more than 49 % of batch 2)",
        ),
        (["d"], {"a": "proven", "c": "proven"}, 50, ""),
        (["d"], {"a": "proven"}, 50, "b, c failed or was lost"),
        (["b", "c"], {}, 50, "a failed or was lost in an earlier batch (more than 50 % of batch 1)"),
        (["b", "c"], {}, 100, "no canary was proven (a failed)"),
        (["d"], {"a": "proven", "b": "skipped", "c": "proven"}, 0, ""),
        (["b"], {"a": "skipped"}, 0, "no canary was proven (a was left alone as busy)"),
    ],
)
def test_a_batch_begins_only_after_proven_ones(
    batch: list[str], outcomes: dict[str, str], allowed: float, says: str
) -> None:
    reason = halt(["a", "b", "c", "d"], batch, outcomes, [1, 2, 1], allowed)
    assert says in reason
    assert bool(reason) == bool(says)


def test_a_host_with_other_work_gets_its_turn_though_it_serves_already() -> None:
    staged = {"release": "v1", "needs_switch": False, "reasons": []}
    made = plan(
        ["a", "b"], ["a", "b"], {"a": {"staged": staged, "more": "serving mode serving"}, "b": {"staged": staged}}, [1]
    )
    assert made["switch"] == ["a"]
    assert "serving mode serving" in made["rows"]["a"]["text"] and made["rows"]["b"]["state"] == "ok"


# ------------------------------------------------------------------------------------------------------------ filter

_SPEC = importlib.util.spec_from_file_location(
    "rollout_filter", Path(__file__).resolve().parents[2] / "plugins/filter/ds4_rollout.py"
)
assert _SPEC and _SPEC.loader
door = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(door)


def test_the_next_play_takes_the_hosts_of_the_newest_plan() -> None:
    """A host that was absent from it still has the plan of an earlier playbook of the same command."""
    older, newer = {"switch": ["a", "b"], "made": 1.0}, {"switch": ["b"], "made": 2.0}
    hostvars: dict[str, dict[str, Any]] = {
        "a": {"__engine_service_rollout": older},
        "b": {"__engine_service_rollout": newer},
        "c": {},
    }
    assert door.ds4_rollout_hosts(["a", "b", "c", "d"], hostvars) == ["b"]
    hostvars["b"]["__engine_service_rollout"] = {"switch": [], "made": 3.0}
    assert door.ds4_rollout_hosts(["a", "b"], hostvars) == []
    assert door.ds4_rollout_hosts(["c"], hostvars) == []
    assert door.ds4_rollout_hosts([], {}) == []


def test_a_plan_is_dated() -> None:
    first = door.ds4_rollout([], {}, [], [1])
    assert door.ds4_rollout([], {}, [], [1])["made"] >= first["made"] > 0
