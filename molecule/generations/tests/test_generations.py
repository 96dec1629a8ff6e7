"""Each policy about old weights did what it says, in the order it must be done in; the order is read from the journal."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lab import scenario
from lab.api import Host, Lab
from lab.fetching import lab_file
from lab.hub import weights

UNIT_STARTED, UNIT_STOPPED = (
    "39f53479d3a045ac8e11786248231fbf",
    "9d1aaa27d60140bd96365438aad20286",
)  # systemd's message ids
LEGACY = weights.manifest()["legacy"]


class Event(NamedTuple):
    """One line of a host's journal; ``at`` in seconds since the epoch."""

    at: float
    unit: str
    kind: str
    text: str


class Events:
    """The journal of a host, oldest first."""

    def __init__(self, spark: Host) -> None:
        out = spark.run(["journalctl", "--no-pager", "-o", "json"]).out
        self.all = [self._event(json.loads(line)) for line in out.splitlines()]

    @staticmethod
    def _event(entry: Mapping[str, Any]) -> Event:
        at = int(entry["__REALTIME_TIMESTAMP"]) / 1e6
        unit = str(entry.get("UNIT") or entry.get("_SYSTEMD_UNIT") or "")
        return Event(at, unit, str(entry.get("MESSAGE_ID") or ""), str(entry.get("MESSAGE") or ""))

    def unit(self, unit: str, kind: str) -> list[float]:
        """When a unit was started or stopped."""
        return [event.at for event in self.all if event.unit == unit and event.kind == kind]

    def said(self, text: str) -> list[float]:
        """When a line with this text was written."""
        return [event.at for event in self.all if text in event.text]


@pytest.fixture(scope="module")
def sparks(lab: Lab) -> dict[str, Host]:
    return {spark.name: spark for spark in lab.hosts}


@pytest.fixture(scope="module")
def events(sparks: dict[str, Host]) -> dict[str, Events]:
    return {name: Events(spark) for name, spark in sparks.items()}


def files(spark: Host) -> set[str]:
    return set(spark.run(["ls", "-A", "/mnt/weights"]).out.split())


def hashes(spark: Host, folder: str) -> set[str]:
    return {line.split()[0] for line in spark.run(f"sha256sum {folder}/*.gguf").out.splitlines()}


@pytest.mark.parametrize("name", ["spark1", "spark2", "spark3"])
def test_the_new_generation_serves(sparks: dict[str, Host], variables: dict[str, dict[str, Any]], name: str) -> None:
    spark, expected = sparks[name], variables[name]
    question = {
        "model": "deepseek-v4-flash",
        "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
        "temperature": 0,
    }
    argv = ["curl", "-sS", "-H", "Content-Type: application/json", "-d", json.dumps(question)]
    assert "Paris" in spark.run([*argv, "http://127.0.0.1:8000/v1/chat/completions"]).out
    command = spark.run("tr '\\0' '\\n' </proc/$(systemctl show ds4 -p MainPID --value)/cmdline").out.split()
    for file in expected["files"]:
        assert f"/mnt/weights/{file['file']}" in command, "base and drafter are one generation, named one by one"
    assert not [word for word in command for entry in LEGACY.values() if word.endswith(f"/{entry['file']}")]


def test_keep_keeps(sparks: dict[str, Host], events: dict[str, Events]) -> None:
    assert {entry["sha256"] for entry in LEGACY.values()} <= hashes(sparks["spark1"], "/mnt/weights")
    assert events["spark1"].said("ds4-weights: removing") == []


def test_remove_after_smoke_removes_only_then(sparks: dict[str, Host], events: dict[str, Events]) -> None:
    assert not {entry["file"] for entry in LEGACY.values()} & files(sparks["spark2"])
    assert not [name for name in files(sparks["spark2"]) if name.endswith(".record.json") and "0731" not in name]
    happened = events["spark2"]
    removed = happened.said("ds4-weights: removing")
    assert len(removed) >= len(LEGACY)
    started = happened.unit("ds4.service", UNIT_STARTED)
    assert len(started) == 2, "once for each generation"
    assert min(removed) > happened.said("proven: deployment")[-1] > started[-1]


def test_only_what_was_named_is_cleaned_elsewhere(sparks: dict[str, Host]) -> None:
    spark = sparks["spark2"]
    assert not spark.exists(f"/srv/named/{LEGACY['mtp']['file']}")
    for other in ("spark1", "spark3"):
        assert sparks[other].exists(f"/srv/named/{LEGACY['mtp']['file']}")


@pytest.mark.parametrize("name", ["spark1", "spark2", "spark3"])
def test_what_is_not_ours_survives(sparks: dict[str, Host], name: str) -> None:
    spark = sparks[name]
    assert "other.gguf" in files(spark)
    assert spark.run(["readlink", "/mnt/weights/link.gguf"]).out.strip().endswith(LEGACY["drafter"]["file"])
    assert hashes(spark, "/srv/elsewhere") == {LEGACY["drafter"]["sha256"]}


def test_remove_before_fetch_is_part_of_the_switch(sparks: dict[str, Host], events: dict[str, Events]) -> None:
    """Stop, delete, fetch, start: a mapped file frees nothing when it is deleted."""
    happened = events["spark3"]
    stopped = happened.unit("ds4.service", UNIT_STOPPED)
    started = happened.unit("ds4.service", UNIT_STARTED)
    removed = happened.said("ds4-weights: removing")
    fetched = happened.said("complete, sha256")
    assert (len(stopped), len(started)) == (1, 2)
    assert stopped[0] < min(removed), "nothing is deleted before the old service has stopped"
    new = [at for at in fetched if at > started[0]]
    assert max(removed) < min(new), "nothing is fetched before there is room"
    assert max(new) < started[1], "nothing is started before everything is there"
    assert not {entry["file"] for entry in LEGACY.values()} & files(sparks["spark3"])


def test_the_table_says_what_the_switch_exchanged() -> None:
    text = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"], "ansible.log").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if "GiB deleted" in line and "exchanged in the switch" in line]
    assert len(rows) == 1 and "weights" in rows[0] and "changed" in rows[0]


def test_the_canary_came_first(events: dict[str, Events]) -> None:
    """No host deletes anything before the first one is proven."""
    proven = events["spark1"].said("proven: deployment")[-1]
    for name in ("spark2", "spark3"):
        assert proven < min(events[name].said("ds4-weights: removing"))
        assert proven < events[name].unit("ds4.service", UNIT_STOPPED)[0]


def test_every_host_fetched_each_file_once(lab: Lab, variables: dict[str, dict[str, Any]]) -> None:
    stats = lab.hub.stats()
    sent = {
        (request["client"], request["file"]): 0 for request in stats["requests"] if request["at"] == "cdn"
    }  # client address and file → bytes
    for request in stats["requests"]:
        if request["at"] == "cdn":
            sent[(request["client"], request["file"])] += request["sent"]
    sizes = {file["file"]: file["bytes"] for file in variables["spark1"]["files"]}
    for spark in lab.hosts:
        for name, size in sizes.items():
            assert size <= sent[(spark.address, name)] <= 1.2 * size, (spark.name, name)


def test_an_interrupted_clean_up_goes_on_without_a_switch(lab: Lab, sparks: dict[str, Host]) -> None:
    """What a kill leaves: a record without its file, and a file in a named folder that nobody has read yet."""
    spark, mtp = sparks["spark2"], LEGACY["mtp"]
    orphan, named = f"/mnt/weights/{mtp['file']}.record.json", f"/srv/named/{mtp['file']}"
    spark.run(f"cp -p /mnt/weights/*.record.json /tmp && cp -p $(ls /tmp/*.record.json | head -1) {orphan}")
    weights.write_file(lab_file("legacy", "mtp"), mtp["bytes"], spark.path(named))
    serving = spark.run("systemctl show ds4 -p MainPID --value").out
    scenario.run(lab, "site.yml", "--limit", "spark2")
    assert not spark.exists(orphan) and not spark.exists(named)
    assert spark.run("systemctl show ds4 -p MainPID --value").out == serving, "nothing was switched for it"
    assert "changed=0 " in scenario.run(lab, "site.yml", "--limit", "spark2")
