"""Switching on a simulated Spark: bad releases, interruptions, adoption, the way back. Always by the playbooks themselves.

The host serves v0.6.5 and has v0.6.6 built; faults of the stand-in engine are switched on for one of the two.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ds4.systemd_text import environment_file, exec_line, path_list
from lab import harness
from lab.api import Host, Lab
from lab.served import (
    LIMITS,
    answers,
    build_dir,
    end_plays,
    engines,
    faults,
    has_step,
    inflight,
    kill_play,
    long_request,
    pid,
    record,
    serving,
    start_play,
    until,
)

pytestmark = pytest.mark.lab

OLD, NEW = "v0.6.5", "v0.6.6"
SWITCH = "switch | Switch to the wanted deployment, or return to what served"


def play(
    host: Host, playbook: str = "site.yml", *, check: bool = False, tags: str = "", **extra: Any
) -> harness.Result:
    """One run against exactly this host."""
    return harness.play(host.lab, playbook, extra_vars={**LIMITS, **extra}, check=check, tags=tags)


@pytest.fixture(scope="module")
def ready(lab_session: Lab) -> Iterator[Host]:
    """A host that serves OLD and has NEW built beside it, saved as a snapshot."""
    host = lab_session.hosts[0]
    host.reset()
    host.used = True
    for other in lab_session.hosts[1:]:
        other.power_off()
    lab_session.write_inventory([host])
    first = play(host, ds4_release=OLD)
    assert first.rc == 0, first.text
    staged = play(host, tags="verify,stage", ds4_release=NEW)
    assert staged.rc == 0, staged.text
    assert serving(host) == OLD, "staging leaves the old service alone"
    host.snapshot("ready")
    yield host
    host.used = True


# A snapshot is a copy, so the weights have other inodes than when they were verified: the gate would rightly stay closed.
REVERIFY = """
import glob, json, os
for path in glob.glob("/var/lib/ds4/weights/*.record.json"):
    record = json.load(open(path))
    record["inode"] = os.stat(path[: -len(".record.json")]).st_ino
    json.dump(record, open(path, "w"))
"""


def restore(host: Host) -> None:
    """The saved host, booted and serving."""
    end_plays(host)
    host.reset("ready")
    host.run(["python3", "-c", REVERIFY])
    host.run("systemctl reset-failed ds4; systemctl start ds4")
    until(lambda: answers(host), "the service answers after a boot")


@pytest.fixture
def served(ready: Host) -> Host:
    """That host, as it was saved, after a boot."""
    restore(ready)
    return ready


# ------------------------------------------------------------------------------------------------------ bad releases


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        ({"exit_at_start": 1}, "ready"),
        ({"never_ready": True}, "ready"),
        ({"garbage": True}, "smoke"),
        ({"poison_after": 0}, "smoke"),
        ({"speculation_off": True}, "smoke"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_release_puts_itself_back(served: Host, fault: dict[str, Any], step: str) -> None:
    faults(served, NEW, **fault)
    result = play(served, ds4_release=NEW, engine_service_ready_seconds=8 if "never_ready" in fault else 25)
    assert result.rc != 0
    done = record(served)
    assert (done["outcome"], done["failure"]["step"]) == ("returned", step)
    assert serving(served) == OLD
    assert answers(served)
    assert engines(served) == 1
    message = next(text for text in result.failed("spark1") if "RETURNED" in text)
    assert f"({OLD}) serves again" in message
    assert done["evidence"] in message
    names = served.run(f"ls {done['evidence']}").out.split()
    assert {"journal-failed.txt", "smoke-again.json"} <= set(names)
    assert done["to"] not in served.read("/var/lib/ds4/state/deployments.json")


def test_an_option_that_the_new_release_refuses_is_found_before_the_stop(served: Host) -> None:
    faults(served, NEW, refuse_flag="--kv-disk-dir")
    before = pid(served)
    result = play(served, ds4_release=NEW)
    assert result.rc != 0
    assert record(served)["outcome"] == "refused"
    assert any("unknown option: --kv-disk-dir" in text for text in result.failed("spark1"))
    assert pid(served) == before, "the old process never noticed"


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        ({"engine_service_extra_args": ["--no-such"]}, "unknown option: --no-such"),
        ({"engine_service_extra_args": ["--trace"]}, "--trace without the value that it needs"),
        ({"engine_service_extra_env": {"DS4_NO_SUCH": "1"}}, "DS4_NO_SUCH not named in"),
    ],
    ids=["flag", "value", "variable"],
)
def test_an_extra_that_the_engine_does_not_know_is_found_before_the_stop(
    served: Host, extra: dict[str, Any], found: str
) -> None:
    before = pid(served)
    result = play(served, ds4_release=OLD, **extra)
    assert result.rc != 0
    assert record(served)["outcome"] == "refused"
    assert any(found in text for text in result.failed("spark1")), result.text
    assert pid(served) == before, "the old process never noticed"


def test_a_release_that_is_slow_or_busy_at_first_is_waited_for(served: Host) -> None:
    faults(served, NEW, start_seconds=4, busy_seconds=3)
    result = play(served, ds4_release=NEW)
    assert result.rc == 0, result.text
    assert serving(served) == NEW


def test_a_good_release_is_proven_kept_conversations_and_prunes_nothing_it_may_need(served: Host) -> None:
    prompt = json.dumps(
        {"model": "deepseek-v4-flash", "messages": [{"role": "user", "content": "long " * 600}], "max_tokens": 8}
    )
    served.run(["curl", "-s", "-d", prompt, "http://127.0.0.1:8000/v1/chat/completions"])
    result = play(served, ds4_release=NEW)
    assert result.rc == 0, result.text
    done = record(served)
    assert (done["outcome"], serving(served)) == ("proven", NEW)
    assert 0 < done["downtime_seconds"] < 30
    stop = next(step for step in done["steps"] if step["name"] == "stop")
    assert "conversation file(s) were written" in stop["text"]
    assert served.run("ls /var/lib/ds4/kv/*/*.kv | wc -l").out.strip() != "0"
    assert served.exists(build_dir(OLD))
    again = play(served, ds4_release=NEW)
    assert again.rc == 0
    assert again.changed("spark1") == []


# ------------------------------------------------------------------------------------- an old engine that will not go


def test_an_engine_that_ignores_sigterm_is_killed_within_the_limit(served: Host) -> None:
    faults(served, OLD, ignore_sigterm=True)
    assert play(served, ds4_release=NEW).rc == 0
    assert "had to be killed" in next(step["text"] for step in record(served)["steps"] if step["name"] == "stop")
    assert serving(served) == NEW


def test_memory_that_is_late_is_waited_for(served: Host) -> None:
    faults(served, OLD, hold_memory_seconds=6)
    assert play(served, ds4_release=NEW).rc == 0
    done = record(served)
    assert done["outcome"] == "proven"
    memory = next(step for step in done["steps"] if step["name"] == "memory")
    assert memory["finished"] - memory["started"] > 3


def test_memory_that_never_comes_back_means_reboot_and_no_blind_start(served: Host) -> None:
    faults(served, OLD, hold_memory_seconds=-1)
    result = play(served, ds4_release=NEW)
    assert result.rc != 0
    assert record(served)["outcome"] == "stopped"
    assert any("Reboot the host" in text for text in result.failed("spark1"))
    assert engines(served) == 0
    served.reboot()
    until(lambda: answers(served), "after the reboot the proven release starts by itself")
    assert serving(served) == OLD


# ----------------------------------------------------------------------------------------------------- interruptions


def test_a_controller_that_dies_in_the_middle_is_not_needed(served: Host) -> None:
    faults(served, NEW, start_seconds=6)
    controller = start_play(served, ds4_release=NEW)
    until(lambda: has_step(served, "stop"), "the switch has stopped the old engine", 240)
    kill_play(served, controller)
    until(lambda: bool(record(served)["outcome"]), "the host finishes alone")
    assert (record(served)["outcome"], serving(served)) == ("proven", NEW)
    again = play(served, ds4_release=NEW)
    assert again.rc == 0, again.text
    assert again.changed("spark1") == []


def test_a_bad_release_returns_without_a_controller_too(served: Host) -> None:
    faults(served, NEW, start_seconds=3, garbage=True)
    controller = start_play(served, ds4_release=NEW)
    until(lambda: has_step(served, "stop"), "the switch has stopped the old engine", 240)
    kill_play(served, controller)
    until(lambda: bool(record(served)["outcome"]), "the host finishes alone")
    assert (record(served)["outcome"], serving(served)) == ("returned", OLD)


def test_a_lost_link_is_survived(served: Host) -> None:
    faults(served, NEW, start_seconds=8)
    controller = start_play(served, ds4_release=NEW)
    until(lambda: has_step(served, "start"), "the new engine is being started", 240)
    served.link_down()
    time.sleep(12)
    served.link_up()
    assert controller.wait(180) == 0
    assert (record(served)["outcome"], serving(served)) == ("proven", NEW)


@pytest.mark.parametrize(("fault", "version", "outcome"), [({}, NEW, "proven"), ({"garbage": True}, OLD, "returned")])
def test_a_reboot_in_the_middle_is_resolved_at_boot(
    served: Host, fault: dict[str, Any], version: str, outcome: str
) -> None:
    faults(served, NEW, start_seconds=30, **fault)
    controller = start_play(served, ds4_release=NEW)
    until(lambda: has_step(served, "ready"), "the new engine loads", 240)
    served.reboot()
    faults(served, NEW, **fault)  # /run is empty after a boot; the engine reads it while it starts
    kill_play(served, controller)
    until(lambda: bool(record(served)["outcome"]), "the transaction is finished at boot", 90)
    assert record(served)["outcome"] == outcome
    assert serving(served) == version
    assert engines(served) == 1
    assert not served.exists("/var/lib/ds4/state/transactions/open")


def test_a_reboot_that_brings_the_old_release_up_again_does_not_pass_for_the_new_one(served: Host) -> None:
    """Between the stop and the new unit the boot starts the old one: it is stopped again, and the new one is proven."""
    faults(served, OLD, hold_memory_seconds=10)
    controller = start_play(served, ds4_release=NEW)
    until(lambda: has_step(served, "memory"), "the old engine has ended", 240)
    served.reboot()
    kill_play(served, controller)
    until(lambda: bool(record(served)["outcome"]), "the transaction is finished at boot", 90)
    assert (record(served)["outcome"], serving(served), engines(served)) == ("proven", NEW, 1)


def test_a_reboot_during_a_first_installation_is_finished_at_boot(served: Host) -> None:
    """Nothing is enabled yet, so nothing but the switch itself starts the service again."""
    served.run("systemctl disable --now ds4; rm -f /var/lib/ds4/state/deployments.json")
    faults(served, OLD, start_seconds=30)
    controller = start_play(served, ds4_release=OLD)
    until(lambda: has_step(served, "ready"), "the engine loads", 240)
    served.reboot()
    kill_play(served, controller)
    until(lambda: bool(record(served)["outcome"]), "the transaction is finished at boot", 90)
    assert (record(served)["outcome"], serving(served)) == ("proven", OLD)
    assert served.run("systemctl is-enabled ds4").out.strip() == "enabled"


def test_a_runner_that_is_killed_is_started_again(served: Host) -> None:
    faults(served, NEW, start_seconds=5)
    controller = start_play(served, ds4_release=NEW)
    until(lambda: has_step(served, "ready"), "the new engine loads", 240)
    served.run("systemctl kill --signal=SIGKILL ds4-switch.service")
    assert controller.wait(180) == 0
    assert (record(served)["outcome"], serving(served)) == ("proven", NEW)


@pytest.mark.faults
def test_runs_killed_at_random_points_converge(ready: Host) -> None:
    """Without anybody the host serves what was proven, and the next run always ends at the wanted release."""
    for seed in range(int(os.environ.get("FAULT_SEEDS", "2"))):
        dice = random.Random(seed)
        restore(ready)
        controller = start_play(ready, ds4_release=NEW)
        time.sleep(dice.uniform(2, 40))
        kill_play(ready, controller)
        time.sleep(3)  # a module that had just come to the host may still begin a switch
        if dice.random() < 0.3:
            ready.reboot()
        assert engines(ready) <= 1, f"seed {seed}"
        until(lambda: not ready.exists("/var/lib/ds4/state/transactions/open"), f"seed {seed}: the switch ends", 120)
        until(lambda: answers(ready), f"seed {seed}: something serves")
        assert engines(ready) == 1, f"seed {seed}"
        assert ready.run("test -e /opt/ds4/current/manifest.json", check=False).rc == 0, f"seed {seed}"
        proven = [entry["release"] for entry in json.loads(ready.read("/var/lib/ds4/state/deployments.json"))["proven"]]
        assert serving(ready) in proven, f"seed {seed}"
        result = play(ready, ds4_release=NEW)
        assert result.rc == 0, f"seed {seed}: {result.text}"
        assert serving(ready) == NEW, f"seed {seed}"
        assert engines(ready) == 1, f"seed {seed}"
        assert ready.run("test -e /opt/ds4/current/manifest.json", check=False).rc == 0, f"seed {seed}"


# ------------------------------------------------------------------------------------------------- drift and healing


def test_a_unit_edited_by_hand_is_put_back_and_said(served: Host) -> None:
    unit = served.read("/etc/systemd/system/ds4.service")
    served.put("/etc/systemd/system/ds4.service", unit.replace("Restart=always", "Restart=no\nMemoryMax=64G"))
    served.run("systemctl daemon-reload")
    result = play(served, ds4_release=OLD)
    assert result.rc == 0, result.text
    assert served.read("/etc/systemd/system/ds4.service") == unit
    assert "was edited by hand" in result.text
    assert "MemoryMax" not in served.run("systemctl cat ds4").out


def test_an_environment_edited_by_hand_is_put_back_in_file_and_process(served: Host) -> None:
    served.run("sed -i 's|^DS4_CODEX_MODELS_FILE=.*|DS4_CODEX_MODELS_FILE=/nowhere|' /opt/ds4/current/ds4.env")
    served.run("systemctl restart ds4")
    until(lambda: answers(served), "it serves with the other environment")
    status = play(served, "status.yml", ds4_release=OLD)
    assert "started with other values of DS4_CODEX_MODELS_FILE" in status.text
    assert play(served, ds4_release=OLD).rc == 0
    environment = served.run(f"tr '\\0' '\\n' </proc/{pid(served)}/environ").out
    assert "/nowhere" not in environment
    assert "DS4_CODEX_MODELS_FILE=/opt/ds4/deployments/" in environment


def test_a_new_comment_restarts_nothing(served: Host) -> None:
    before = pid(served)
    unit = served.read("/etc/systemd/system/ds4.service")
    served.put("/etc/systemd/system/ds4.service", unit + "# a note\n")
    assert play(served, ds4_release=OLD).rc == 0
    assert pid(served) == before
    assert served.read("/etc/systemd/system/ds4.service") == unit


def test_what_was_damaged_beside_the_process_is_put_right_without_a_restart(served: Host) -> None:
    before = pid(served)
    served.run(
        "cd /opt/ds4/current/ && chmod 666 ds4.env && rm ds4-serve && chmod 700 . && cd / && rm /usr/local/bin/ds4-serve "
        "&& ln -sfn /tmp/$(basename $(readlink /opt/ds4/current)) /opt/ds4/current "
        "&& ln -sfn /tmp/$(readlink /opt/ds4/lib/current) /opt/ds4/lib/current "
        "&& echo '# edited' >>/etc/systemd/system/ds4.service"
    )
    predicted = play(served, check=True)
    result = play(served)
    assert (predicted.rc, result.rc) == (0, 0), result.text
    assert predicted.changed("spark1") == result.changed("spark1") != []
    assert pid(served) == before
    assert served.run("stat -L -c %a /opt/ds4/current/ds4.env /opt/ds4/current").out.split() == ["640", "755"]
    assert served.run("head -1 /usr/local/bin/ds4-serve").out.startswith("#!")
    assert "# edited" not in served.read("/etc/systemd/system/ds4.service")
    assert play(served).changed("spark1") == []


def test_a_stopped_service_heals_and_a_killed_one_heals_itself(served: Host) -> None:
    before = pid(served)
    served.run(f"kill -TERM {before}")
    until(lambda: answers(served) and pid(served) != before, "systemd starts it again though it ended with 0")
    served.run("systemctl stop ds4")
    assert play(served, ds4_release=OLD).rc == 0
    assert answers(served)


def test_a_disabled_service_is_enabled_again_without_a_restart(served: Host) -> None:
    before = pid(served)
    served.run("systemctl disable ds4")
    result = play(served, ds4_release=OLD)
    assert result.rc == 0, result.text
    assert "it does not start at boot" in result.text
    assert served.run("systemctl is-enabled ds4").out.strip() == "enabled"
    assert pid(served) == before
    assert record(served)["stopped_at"] is None


def test_status_reads_the_running_process_and_names_drift(served: Host) -> None:
    before = pid(served)
    result = play(served, "status.yml", ds4_release=NEW)
    assert result.rc == 0, result.text
    assert pid(served) == before
    assert f"{OLD} serves as" in result.text
    assert f"release {OLD}, wanted {NEW}" in result.text
    same = play(served, "status.yml", ds4_release=OLD)
    assert "is exactly what is wanted" in same.text


def test_a_binary_replaced_by_hand_is_drift(served: Host) -> None:
    server = f"{build_dir(OLD)}/ds4-server"
    served.run(f"cp {server} /tmp/other && printf x >>/tmp/other && mv /tmp/other {server}")
    result = play(served, "status.yml", ds4_release=OLD)
    assert "replaced" in result.text


# ------------------------------------------------------------------------------------------------------- the way back


def test_rollback_goes_back_and_forth_by_the_same_transaction(served: Host) -> None:
    assert play(served, ds4_release=NEW).rc == 0
    preview = play(served, "rollback.yml", check=True)
    assert preview.rc == 0
    assert f"would switch to {OLD}" in preview.text
    assert serving(served) == NEW
    assert play(served, "rollback.yml").rc == 0
    assert serving(served) == OLD
    newest = json.loads(served.read("/var/lib/ds4/state/deployments.json"))["proven"]
    named = next(entry["id"] for entry in newest if entry["release"] == NEW)
    assert play(served, "rollback.yml", deployment=named).rc == 0
    assert serving(served) == NEW


def test_rollback_is_refused_before_any_stop_when_the_build_is_gone(served: Host) -> None:
    assert play(served, ds4_release=NEW).rc == 0
    served.run(f"rm -rf {build_dir(OLD)}")
    before = pid(served)
    result = play(served, "rollback.yml")
    assert result.rc != 0
    assert any("nothing was stopped" in text and "the build is gone" in text for text in result.failed("spark1"))
    assert pid(served) == before


PRUNE = "prune | Remove deployments and builds beyond the last proven ones"


def test_pruning_is_predicted_and_keeps_what_may_be_needed(served: Host) -> None:
    older, oldest = "v0.6.4", "v0.6.3"  # oldest has other weights, which it needs to be gone back to
    for release in (oldest, older, OLD):
        assert play(served, ds4_release=release).rc == 0
    preview = play(served, ds4_release=NEW, engine_service_keep=2, check=True)
    predicted = preview.task("spark1", PRUNE)["removed"]
    assert predicted["builds"] == [build_dir(oldest), build_dir(older)]
    assert served.exists(build_dir(oldest)), "a preview removes nothing"
    result = play(served, ds4_release=NEW, engine_service_keep=2)
    assert result.rc == 0, result.text
    assert result.task("spark1", PRUNE)["removed"] == predicted
    assert [served.exists(build_dir(release)) for release in (oldest, older, OLD, NEW)] == [False, False, True, True]
    assert play(served, "rollback.yml").rc == 0
    assert serving(served) == OLD


def test_fewer_proven_deployments_than_active_and_way_back_are_refused(served: Host) -> None:
    result = play(served, ds4_release=OLD, engine_service_keep=1)
    assert result.rc != 0
    assert "required: 2 or more" in result.text


# -------------------------------------------------------------------------------------------------- requests in flight


def test_a_busy_host_is_left_alone_when_asked(served: Host) -> None:
    faults(served, OLD, speed=0.0005)  # the request outlasts the run
    before = pid(served)
    request = long_request(served)
    until(lambda: inflight(served), "a request is running", 20)
    result = play(served, ds4_release=NEW, engine_service_busy="skip")
    request.kill()
    request.wait()
    assert record(served)["outcome"] == "skipped"
    assert pid(served) == before
    assert result.task("spark1", SWITCH)["changed"] is False


def test_a_running_request_is_answered_before_the_stop(served: Host) -> None:
    faults(served, OLD, speed=0.002)  # half a minute: seen before the run, and still going on when the run comes to it
    request = long_request(served)
    until(lambda: inflight(served), "a request is running", 20)
    assert play(served, ds4_release=NEW, engine_service_busy="wait", engine_service_busy_seconds=60).rc == 0
    out, _err = request.communicate(timeout=60)
    assert json.loads(out)["choices"][0]["message"]["content"]
    assert serving(served) == NEW


# ---------------------------------------------------------------------------------------------- somebody else's engine


INSTALL = """
set -e
mkdir -p ~/code ~/gguf
git clone -q --depth 1 -b v0.6.4 {engine} ~/code/ds4
make -C ~/code/ds4 cuda-spark >/dev/null 2>&1
cp /var/lib/ds4/weights/*0731.gguf ~/gguf/
"""
START = (
    "cd ~ && MY_SECRET=hunter2 DS4_SERVER_MAX_CLIENTS=77 nohup ./code/ds4/ds4-server --cuda "
    "-m ~/gguf/DeepSeek-V4-Flash-IQ2XXS-w2Q2K-AProjQ8-SExpQ8-OutQ8-chat-v2-imatrix-0731.gguf -c 131072 --cors "
    ">~/ds4-server.log 2>&1 </dev/null &"
)


def identity(host: Host) -> tuple[str, str, str, str]:
    """Command line, environment, folder and owner of the engine that runs."""
    number = host.run("pgrep -x ds4-server").out.strip()
    return (
        host.run(f"tr '\\0' '\\n' </proc/{number}/cmdline").out,
        host.run(f"tr '\\0' '\\n' </proc/{number}/environ | sort").out,
        host.run(f"readlink /proc/{number}/cwd").out.strip(),
        host.run(f"stat -c %U /proc/{number}").out.strip(),
    )


@pytest.fixture
def occupied(served: Host) -> Host:
    """An engine as the public installer leaves it; nothing of ours was ever staged, and only ~/gguf has weights."""
    served.run(INSTALL.format(engine=served.lab.engine.url), user=served.user, timeout=180)
    served.run("systemctl disable --now ds4; rm -rf /var/lib/ds4/state/deployments.json /tmp/ds4.lock")
    served.run(
        "rm -r /opt/ds4/deployments/* /opt/ds4/current /etc/systemd/system/ds4.service /usr/local/bin/ds4-serve; systemctl daemon-reload"
    )
    served.run("rm /var/lib/ds4/weights/*.gguf /var/lib/ds4/weights/*.record.json")
    served.run(START, user=served.user)
    until(lambda: answers(served), "the foreign engine answers")
    return served


def fetched(host: Host) -> int:
    """Bytes of weights that the hub ever sent."""
    return int(host.lab.hub.stats()["bytes"]["cdn"])


def test_a_foreign_engine_is_named_and_left_alone(occupied: Host) -> None:
    before = identity(occupied)
    result = play(occupied, ds4_release=OLD)
    assert result.rc != 0
    assert "code/ds4/ds4-server" in result.text
    assert "engine_service_adopt" in result.text
    assert identity(occupied) == before


def test_a_foreign_engine_is_adopted_when_asked(occupied: Host) -> None:
    before = fetched(occupied)
    preview = play(occupied, ds4_release=OLD, engine_service_adopt=True, check=True)
    assert "taking over process" in preview.text
    assert "-c 131072 (ours: 524288)" in preview.text
    result = play(occupied, ds4_release=OLD, engine_service_adopt=True)
    assert result.rc == 0, result.text
    assert (serving(occupied), engines(occupied)) == (OLD, 1)
    assert "--cors" in result.text
    assert "hunter2" not in result.text + occupied.journal()
    assert occupied.run("ls ~/gguf | wc -l", user=occupied.user).out.strip() == "2", "its files are left"
    assert occupied.run("ls /var/lib/ds4/weights/*.gguf | wc -l").out.strip() == "2"
    assert fetched(occupied) == before, "not a byte was downloaded"


def test_a_failed_adoption_gives_the_very_process_back(occupied: Host) -> None:
    before, bytes_before = identity(occupied), fetched(occupied)
    faults(occupied, OLD, exit_at_start=1)
    result = play(occupied, ds4_release=OLD, engine_service_adopt=True)
    assert result.rc != 0
    assert record(occupied)["outcome"] == "returned"
    assert identity(occupied) == before
    assert answers(occupied)
    assert fetched(occupied) == bytes_before
    assert occupied.run("systemctl is-enabled ds4", check=False).out.strip() == "disabled"
    adopted = f"{record(occupied)['evidence']}/adopted.json"
    assert occupied.run(f"stat -c '%U %a' {adopted}").out.strip() == "root 600"
    assert "hunter2" not in result.text + occupied.journal()


@pytest.mark.parametrize("kind", ["system", "wrapper", "user"])
def test_an_engine_under_a_unit_of_its_own_is_stopped_and_given_back_by_that_unit(served: Host, kind: str) -> None:
    served.run("systemctl disable --now ds4; rm -f /var/lib/ds4/state/deployments.json /tmp/ds4.lock")
    line = f"{build_dir(OLD)}/ds4-server -m " + served.run("ls /var/lib/ds4/weights/*imatrix-0731.gguf").out.strip()
    if kind == "wrapper":
        served.put("/usr/local/bin/start-llm", f"#!/bin/sh\n{line}\nexit $?\n", 0o755)
        line = "/usr/local/bin/start-llm"
    owner = served.user if kind == "user" else None
    control = "systemctl --user" if owner else "systemctl"
    unit = f"[Service]\nExecStart={line}\nRestart=always\nRestartSec=1\n"
    if owner:
        served.run(f"loginctl enable-linger {owner}")
        install = "mkdir -p ~/.config/systemd/user && cat >~/.config/systemd/user/my-llm.service"
        served.run(install, user=owner, stdin=unit + "[Install]\nWantedBy=default.target\n")
    else:
        unit += f"User={served.user}\n[Install]\nWantedBy=multi-user.target\n"
        served.put("/etc/systemd/system/my-llm.service", unit)
    served.run(f"{control} daemon-reload && {control} enable --now my-llm", user=owner)
    until(lambda: answers(served), "the foreign engine answers")

    def state() -> list[str]:
        return served.run(
            f"{control} is-active my-llm; {control} is-enabled my-llm", check=False, user=owner
        ).out.split()

    faults(served, NEW, exit_at_start=1)
    assert play(served, ds4_release=NEW, engine_service_adopt=True).rc != 0
    assert (record(served)["outcome"], record(served)["serving"]) == ("returned", "foreign")
    assert state() == ["active", "enabled"]
    assert engines(served) == 1
    faults(served, NEW)
    result = play(served, ds4_release=NEW, engine_service_adopt=True)
    assert result.rc == 0, result.text
    assert state() == ["inactive", "disabled"]
    assert (serving(served), engines(served)) == (NEW, 1)


# As cron does: starts the line of a crontab from its own control group and looks after nothing that it started.
CRON = """#!/bin/sh
while sleep 2; do
    test -e /run/cron-paused || runuser -u {user} -- env HOME=/home/{user} sh -c 'pgrep -x ds4-server >/dev/null || {{ {start} }}'
done
"""


def test_an_engine_that_cron_keeps_alive_is_adopted_and_its_crontab_named(occupied: Host) -> None:
    """Of cron itself nothing is ended; should it start the engine again during the way back, that is the way back."""
    user = occupied.user
    occupied.put("/usr/local/sbin/like-cron", CRON.format(user=user, start=START), 0o755)
    occupied.put(
        "/etc/systemd/system/cron.service", "[Service]\nExecStart=/usr/local/sbin/like-cron\nKillMode=process\n"
    )
    occupied.run("mkdir -p /var/spool/cron/crontabs")
    occupied.put(f"/var/spool/cron/crontabs/{user}", "* * * * * pgrep -x ds4-server || ~/code/ds4/ds4-server --cors\n")
    occupied.run("systemctl daemon-reload; pkill -TERM -x ds4-server; systemctl restart cron")
    until(lambda: answers(occupied), "cron has started it")
    before, cron = identity(occupied), occupied.run("systemctl show cron -p MainPID --value").out
    faults(occupied, OLD, exit_at_start=1)
    assert play(occupied, ds4_release=OLD, engine_service_adopt=True).rc != 0
    assert (record(occupied)["outcome"], record(occupied)["serving"]) == ("returned", "foreign")
    until(lambda: engines(occupied) == 1, "one engine is left")
    assert identity(occupied) == before
    assert answers(occupied)
    occupied.run("touch /run/cron-paused")
    faults(occupied, OLD)
    result = play(occupied, ds4_release=OLD, engine_service_adopt=True)
    assert result.rc == 0, result.text
    assert f"/var/spool/cron/crontabs/{user} starts" in result.text
    assert (serving(occupied), engines(occupied)) == (OLD, 1)
    assert occupied.run("systemctl show cron -p MainPID --value").out == cron


def test_a_stale_lock_of_another_user_does_not_stop_the_service(served: Host) -> None:
    served.run("systemctl stop ds4 && rm -f /tmp/ds4.lock")
    served.run("umask 077 && echo 4711 >/tmp/ds4.lock", user=served.user)
    assert play(served, ds4_release=OLD).rc == 0
    assert answers(served)


# ---------------------------------------------------------------------------------------------------------- the gate


def test_the_gate_keeps_a_second_engine_and_a_short_host_out(served: Host) -> None:
    served.run("systemctl stop ds4")
    served.tenant("something-else", 60 * 1024 * 1024)
    ran = served.run("systemctl start ds4", check=False, timeout=60)
    assert ran.rc != 0
    assert "Not enough memory is available" in served.journal("ds4.service")
    assert engines(served) == 0


def test_the_launcher_serves_in_the_foreground_and_appended_arguments_win(served: Host) -> None:
    served.run("systemctl stop ds4")
    process = subprocess.Popen(served.enter_command(["/usr/local/bin/ds4-serve", "--port", "8123"]))
    try:
        until(lambda: served.run("curl -sf http://127.0.0.1:8123/v1/models", check=False).rc == 0, "it answers there")
        assert served.run("stat -c %U /proc/$(pgrep -x ds4-server)").out.strip() == "ds4"
        assert "524288" in served.run("curl -s http://127.0.0.1:8123/v1/models").out
        assert "Umask:\t0077" in served.run("cat /proc/$(pgrep -x ds4-server)/status").out
        assert served.run("readlink /proc/$(pgrep -x ds4-server)/cwd").out.strip() == "/"
    finally:
        served.run("pkill -TERM -x ds4-server", check=False)
        process.wait(30)


def test_the_launcher_keeps_out_while_the_service_waits_for_its_memory(served: Host) -> None:
    served.run("systemctl stop ds4")
    served.tenant("something-else", 60 * 1024 * 1024)
    served.run("systemctl start --no-block ds4")
    until(lambda: "activating" in served.run("systemctl show -p ActiveState ds4").out, "the gate waits")
    ran = served.run("/usr/local/bin/ds4-serve", check=False)
    assert ran.rc == 1
    assert "ds4.service is activating" in ran.err
    assert engines(served) == 0


# ---------------------------------------------------------------------------------------------------- systemd's reading


DUMP = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environb and os.environ)], open('/tmp/dump.json', 'w'))"
HOSTILE = [
    "",
    " ",
    "a b",
    "50%",
    "%n %H %%",
    "$HOME ${HOME} $$",
    "'",
    '"',
    "\\",
    "\\n \\x41",
    "`id`",
    ";",
    "a;b",
    "#x",
    "line\nbreak",
    "tab\there",
    "trailing \\",
    "ünïcödé ☃",
    "\u2028",
    "-@+!",
    "x" * 5000,
]


def test_systemd_reads_back_what_was_meant(served: Host) -> None:
    dice = random.Random(int(os.environ.get("FAULT_SEEDS", "1")))
    made = ["".join(dice.choice("ab \t\n\"'\\$%;`{}=#") for _ in range(dice.randint(1, 30))) for _ in range(60)]
    words = HOSTILE + made
    environment = {f"V{number}": word for number, word in enumerate(words)}
    served.put("/tmp/hostile.env", environment_file(environment))
    line = exec_line(["/usr/bin/python3", "-c", DUMP, *words])
    served.put(
        "/run/systemd/system/hostile.service",
        f"[Service]\nType=oneshot\nEnvironmentFile=/tmp/hostile.env\nExecStart={line}\n",
    )
    served.run("systemctl daemon-reload && systemctl start hostile.service")
    argv, env = json.loads(served.read("/tmp/dump.json"))
    assert argv == words
    assert {name: env.get(name) for name in environment} == environment


def test_systemd_reads_back_the_paths_that_were_meant(served: Host) -> None:
    paths = [
        "/srv/plain",
        "/srv/my slips 50%",
        '/srv/a "quoted" one',
        "/srv/back\\slash",
        "/srv/$HOME",
        "/srv/ünïcödé ☃",
    ]
    for number, path in enumerate(paths):
        served.run(["mkdir", "-p", path])
        served.put(
            f"/run/systemd/system/hostile{number}.service",
            "[Service]\nType=oneshot\nProtectSystem=strict\n"
            f"ReadWritePaths={path_list(['/tmp', path, '-/srv/not there 1%'])}\n"
            f"ExecStart={exec_line(['/usr/bin/touch', path + '/written'])}\n",
        )
        served.run(f"systemctl daemon-reload && systemctl start hostile{number}.service")
        assert served.exists(f"{path}/written")
