"""host_verify on simulated Sparks: every reason why one will not serve, in one message, and nothing touched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab import harness
from lab.api import Host, Lab

pytestmark = pytest.mark.lab

GIB_KIB = 1024 * 1024
GIB = 1024**3
PROBES = ["ds4_look"]
LOOK = "Look at GPU, toolkit, memory and host"
OLD_NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 12.0, V12.0.140'\n"
# A real file system's worth of the real engine: the lab's small weights need a gate of their own size.
REAL_GATE = {"host_verify_memory_required_gib": 99.3}


def verify(lab: Lab, **variables: Any) -> harness.Result:
    """``site.yml --tags verify`` with extra variables."""
    return harness.play(lab, tags="verify", extra_vars=variables or None)


def findings(result: harness.Result, host: str) -> list[str]:
    """Identities of the host's findings, in the order of the message."""
    report = result.task(host, "Report every finding of the host")
    found: list[str] = report["ds4_summary"]["findings"]
    return found


def message(result: harness.Result, host: str) -> str:
    """The one message of a host that failed."""
    failed = result.failed(host)
    assert len(failed) == 1, failed
    return failed[0]


def sound(result: harness.Result, host: str) -> bool:
    return not result.failed(host) and findings(result, host) == []


@contextmanager
def host_variables(lab: Lab, **by_host: dict[str, Any]) -> Iterator[None]:
    """Variables of single hosts, where an operator would write them."""
    folder = Path(lab.inventory, "host_vars")
    folder.mkdir()
    try:
        for name, values in by_host.items():
            (folder / f"{name}.yml").write_text(yaml.safe_dump(values))
        yield
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def disk_state(host: Host) -> str:
    """Every file of the host with size, owner, mode and time, but for logs and what a connection leaves."""
    skip = "-path /proc -o -path /sys -o -path /run -o -path /tmp -o -path /var/log -o -path /var/tmp -o -path '*/.ansible'"
    skip += " -o -path /dev -o -path /var/lib/systemd -o -path /usr/local/cuda-13.0 -o -path /srv"
    return host.run(f"find / -xdev \\( {skip} \\) -prune -o -not -type d -printf '%p %s %u %m %T@\\n' | sort").out


# ----------------------------------------------------------------------------------------- one defect per host


def test_one_defect_per_host_is_one_message_per_host(sparks: Callable[..., list[Host]]) -> None:
    """Twelve hosts in one run; the sound ones go on whatever the others have."""
    gb10 = {"name": "NVIDIA GB10", "compute_cap": "12.1"}
    per_host: dict[str, dict[str, Any]] = {
        "spark1": {"memory": {"total": 125442416}},
        "spark2": {"gpu": {"gpus": [{"name": "ACME Station G1"}]}},  # GB10 under another name
        "spark3": {"gpu": {"state": "absent"}},
        "spark4": {"gpu": {"state": "mismatch"}},
        "spark5": {"gpu": {"state": "hang"}},
        "spark6": {"gpu": {"gpus": [{"name": "NVIDIA RTX PRO 6000", "compute_cap": "12.0"}]}},
        "spark7": {"gpu": {"gpus": [gb10, gb10]}},
        "spark8": {"cuda": False},
        "spark9": {"cuda": False},  # and an old one
        "spark10": {},  # toolkit in a versioned folder only, an older nvcc on PATH
        "spark11": {"memory": {"base": 100 * GIB_KIB}},
        "spark12": {"memory": {"cached": 110 * GIB_KIB}},  # almost nothing is free, almost everything is available
    }
    hosts = {host.name: host for host in sparks(12, per_host=per_host)}
    hosts["spark9"].put("/usr/local/cuda/bin/nvcc", OLD_NVCC, 0o755)
    hosts["spark10"].run("rm -f /usr/local/cuda")
    hosts["spark10"].put("/usr/bin/nvcc", OLD_NVCC, 0o755)
    lab = hosts["spark1"].lab

    with host_variables(lab, spark5={"host_verify_timeout_seconds": 2}):
        result = verify(lab, **REAL_GATE)

    expected: dict[str, list[str]] = {
        "spark1": [],
        "spark2": [],
        "spark3": ["gpu_no_driver"],
        "spark4": ["gpu_mismatch"],
        "spark5": ["gpu_timeout"],
        "spark6": ["compute_cap"],
        "spark7": ["gpu_count"],
        "spark8": ["toolkit_missing"],
        "spark9": ["toolkit_old"],
        "spark10": [],
        "spark11": ["memory"],
        "spark12": [],
    }
    assert {name: findings(result, name) for name in expected} == expected
    stopped = [name for name, ids in expected.items() if ids not in ([], ["memory"])]
    assert [name for name in expected if result.failed(name)] == stopped
    assert result.rc != 0
    assert "reboot the host" in message(result, "spark4")
    assert "no answer within 2 s" in message(result, "spark5")
    assert "12.0 (NVIDIA RTX PRO 6000)" in message(result, "spark6")
    assert "12.0.140 (/usr/local/cuda/bin/nvcc)" in message(result, "spark9")
    chosen = result.task("spark10", LOOK)["gpu"]["toolkit"]
    assert (chosen["version"], chosen["home"], chosen["source"]) == ("13.0.88", "/usr/local/cuda-13.0", "versioned")
    memory = result.task("spark12", LOOK)["memory"]
    assert memory["mem_free_kib"] < 10 * GIB_KIB < 99 * GIB_KIB < memory["mem_available_kib"]
    assert "that will stop the switch" in result.text  # spark11: staging may go on
    for name in ("spark1", "spark3", "spark11"):
        assert f"{name}:" in result.text


# ----------------------------------------------------------------------------------------------- single cases


def test_a_sound_spark_passes_in_three_module_executions(borrowed: Host, tmp_path: Path) -> None:
    since = float(borrowed.run(["date", "+%s.%N"]).out)
    before = disk_state(borrowed)
    result = verify(borrowed.lab, **REAL_GATE)
    assert sound(result, borrowed.name)
    assert result.changed(borrowed.name) == []
    assert borrowed.module_executions(since) == PROBES
    assert disk_state(borrowed) == before
    # The controller's time zone has nothing to do with the host's clock.
    zone = {"TZ": "America/New_York", "DS4_SUMMARY_FILE": str(tmp_path / "summary.json")}
    check = harness.play(borrowed.lab, tags="verify", check=True, diff=True, extra_vars=REAL_GATE, env=zone)
    assert sound(check, borrowed.name)
    assert disk_state(borrowed) == before
    host = result.task(borrowed.name, LOOK)["host"]
    assert host["dgx"]["name"] == "DGX Spark"
    assert host["dgx"]["version"] == host["dgx"]["ota_version"]
    assert host["firmware"]["bios_version"] == "5.36_0ACUM018"
    assert host["systemd"]["running"] is True
    written = json.loads((tmp_path / "summary.json").read_text())["hosts"][borrowed.name]["rooms"]["host_verify"]
    assert written["versions"]["bios"] == "5.36_0ACUM018"
    assert (written["versions"]["kernel"], written["product"]) == (host["kernel"], host["firmware"]["product_name"])
    assert "LAB0000000000" not in json.dumps(host)  # the serial number is nobody's business


def test_another_architecture_is_refused_and_an_override_is_shown_again(borrowed: Host) -> None:
    refused = verify(borrowed.lab, host_verify_architecture="aarch64")
    assert findings(refused, borrowed.name) == ["architecture"]
    assert "host_verify_allow: [architecture]" in message(refused, borrowed.name)
    allowed = verify(borrowed.lab, host_verify_architecture="aarch64", host_verify_allow=["architecture"])
    assert sound(allowed, borrowed.name)
    assert "OVERRIDDEN: architecture" in allowed.text
    assert "overridden by host_verify_allow" in allowed.text


def test_many_problems_at_once_are_one_message_and_nothing_is_touched(sparks: Callable[..., list[Host]]) -> None:
    (host,) = sparks(
        1,
        cuda=False,
        gpu={"driver": "570.211.01", "gpus": [{"compute_cap": "12.0"}]},
        memory={"total": 60 * GIB_KIB},
        disks={"/data": 20},
    )
    host.put("/usr/local/cuda/bin/nvcc", OLD_NVCC, 0o755)
    host.put("/etc/systemd/system/ds4.service", "[Service]\nExecStart=/bin/true\n")
    host.put("/opt/ds4/mine", "something of the operator's\n")
    host.put("/usr/local/bin/ds4-serve", "#!/bin/sh\n", 0o755)
    host.run(["useradd", "--comment", "A person", "ds4"])
    host.run("systemd-run --quiet --unit=web python3 -m http.server 8000")
    host.run("until ss -ltn | grep -q :8000; do sleep 0.1; done", timeout=10)
    before = disk_state(host)

    result = harness.play(
        host.lab,
        extra_vars={
            "host_verify_architecture": "aarch64",
            "host_verify_required_mounts": ["/data", "/nowhere"],
            "weights_directory": "/data/weights",
            **REAL_GATE,
        },
    )

    assert sorted(findings(result, host.name)) == sorted(
        [
            *("architecture", "mount", "foreign_unit", "foreign_user", "foreign_directory", "foreign_file", "disk"),
            *("memory_total", "compute_cap", "driver_old", "toolkit_old", "port", "memory"),
        ]
    )
    text = message(result, host.name)
    for words in (
        "11 problems; nothing was touched",
        "no mount on /nowhere",
        "ds4 (uid 1002, comment 'A person'",
        "/opt/ds4 (owner root, 1 entries)",
        "The file system /data is too small",
        "pid ",
        "(/usr/bin/python3 -m http.server, in web.service) on 0.0.0.0",
        "2 problems that would stop the switch",
    ):
        assert words in text, (words, text)
    assert disk_state(host) == before


@pytest.mark.parametrize(
    ("disk_mib", "present_mib", "expected"),
    [(24, 0, ["disk"]), (60, 24, [])],
    ids=["short on the weights' disk only", "enough only thanks to what is there"],
)
def test_the_weights_disk_is_judged_with_credit_for_what_is_there(
    sparks: Callable[..., list[Host]], disk_mib: int, present_mib: int, expected: list[str]
) -> None:
    (host,) = sparks(1, disks={"/data": disk_mib})
    if present_mib:
        name = _weights_names()[0]
        host.run(f"mkdir -p /data/weights && head -c {present_mib}M /dev/urandom > /data/weights/.{name}.part")
    result = verify(host.lab, weights_directory="/data/weights", host_verify_disk_margin_gib=0.005)
    assert findings(result, host.name) == expected
    if expected:
        assert "The file system /data is too small" in message(result, host.name)
    else:  # without credit it would not be enough
        (row,) = [row for row in result.task(host.name, LOOK)["host"]["disks"] if row["mount"] == "/data"]
        assert row["free_bytes"] < 30 * 2**20 + 0.005 * GIB


def _weights_names() -> list[str]:
    text = Path(__file__).parents[2].joinpath("inventory/lab/group_vars/all/weights.yml").read_text()
    return [entry["file"] for entry in yaml.safe_load(text)["ds4_weights"]["0731"].values()]


def test_small_root_and_large_data_disk_pass(sparks: Callable[..., list[Host]]) -> None:
    (host,) = sparks(1, disks={"/data": 300})
    needs = [
        {"path": "/data/w", "bytes": 250 * 2**20, "what": "weights"},
        {"path": "/opt/ds4", "bytes": 1, "what": "build"},
    ]
    assert sound(verify(host.lab, host_verify_disk_needs=needs, host_verify_disk_margin_gib=0.001), host.name)


ENGINE = """
import fcntl, os, socket, time
lock = open("/tmp/ds4.lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
server = socket.create_server(("127.0.0.1", 8000))
open(f"/run/lab-tenants/{os.getpid()}", "w").write(f"{95 * 1024 * 1024} {os.getpid()}")
time.sleep(600)
"""


def test_an_engine_of_the_public_installer(borrowed: Host) -> None:
    """Holds port, lock and memory: it stops the switch, not the staging, and not at all when it will be taken over."""
    borrowed.put("/tmp/engine.py", ENGINE)
    borrowed.run("nohup bash -c 'exec -a ds4-server python3 /tmp/engine.py' >/tmp/engine.log 2>&1 & ", user="spark")
    try:
        borrowed.run("until ss -ltn | grep -q :8000; do sleep 0.1; done; sleep 0.5", timeout=10)
        plain = verify(borrowed.lab, **REAL_GATE)
        assert plain.rc == 0
        assert findings(plain, borrowed.name) == ["engine", "memory"]
        assert "of spark (ds4-server, in session-" in plain.text
        assert "engine_service_adopt: true" in plain.text
        assert sound(verify(borrowed.lab, engine_service_adopt=True, **REAL_GATE), borrowed.name)
        for off in (
            {"extra_vars": {"engine_service_adopt": False, **REAL_GATE}},
            {"arguments": ["-e", "engine_service_adopt=false"]},
        ):
            result = harness.play(borrowed.lab, tags="verify", **off)  # type: ignore[arg-type]
            assert findings(result, borrowed.name)[:1] == ["engine"]
        words = harness.play(borrowed.lab, tags="verify", arguments=["-e", "engine_service_adopt=true"])
        assert "engine" not in findings(words, borrowed.name)
    finally:
        borrowed.run("pkill -f /tmp/engine.py; rm -f /tmp/engine.py /tmp/engine.log /tmp/ds4.lock", check=False)


def test_a_tenant_of_memory_and_port_is_named(borrowed: Host) -> None:
    borrowed.tenant("vllm", 60 * GIB_KIB)
    borrowed.run("systemd-run --quiet --unit=web --uid=spark python3 -m http.server 8000 --bind 127.0.0.1")
    try:
        borrowed.run("until ss -ltn | grep -q :8000; do sleep 0.1; done", timeout=10)
        result = verify(borrowed.lab, **REAL_GATE)
        assert result.rc == 0
        assert findings(result, borrowed.name) == ["port", "memory"]
        assert "of spark (/usr/bin/python3 -m http.server, in web.service) on 127.0.0.1" in result.text
    finally:
        borrowed.run(["systemctl", "stop", "web.service"])
        borrowed.tenant("vllm", 0)


def test_a_probe_that_never_ends_is_bounded_and_told(borrowed: Host) -> None:
    """Looking at a dead network file system waits for ever; so does reading a pipe that nobody writes."""
    borrowed.run("mv /etc/dgx-release /etc/dgx-release.there && mkfifo /etc/dgx-release")
    try:
        result = verify(borrowed.lab, host_verify_timeout_seconds=3)
        assert findings(result, borrowed.name) == ["probe"]
        text = result.failed(borrowed.name)[-1]
        assert "could not be looked at (gpu, memory, host)" in text
        assert "Timed out after 15 second(s)" in text and "raise host_verify_timeout_seconds" in text
    finally:
        borrowed.run("echo >/etc/dgx-release; mv /etc/dgx-release.there /etc/dgx-release")


def test_hosts_of_a_fleet_that_differ_are_told(sparks: Callable[..., list[Host]]) -> None:
    hosts = sparks(
        3, per_host={"spark2": {"dmi": {"bios_version": "5.30"}, "gpu": {"gpus": [{"vbios_version": "90.00"}]}}}
    )
    result = verify(hosts[0].lab)
    assert result.rc == 0
    assert [findings(result, host.name) for host in hosts] == [[], ["drift"], []]
    assert "bios is 5.30 here, 5.36_0ACUM018 on spark1 and 1 more" in result.text
    assert "vbios is 90.00 here" in result.text


# --------------------------------------------------------------------------------------------- ways to get in


def test_no_root_is_one_message(sparks: Callable[..., list[Host]]) -> None:
    (host,) = sparks(1, sudo="password")
    result = verify(host.lab)
    assert findings(result, host.name) == ["probe"]
    assert "could not be looked at (gpu, memory, host)" in result.failed(host.name)[-1]
    assert "--ask-become-pass" in result.failed(host.name)[-1]
    assert "Traceback" not in result.text


def test_sudo_with_a_password(sparks: Callable[..., list[Host]]) -> None:
    (host,) = sparks(1, sudo="password")
    with host_variables(host.lab, spark1={"ansible_become_password": "simulated-spark"}):
        result = verify(host.lab)
    assert sound(result, host.name)
    assert "simulated-spark" not in result.text


BOGUS_PYTHON = "#!/bin/sh\necho 'this is no python' >&2\nexit 3\n"


def hardened(sparks: Callable[..., list[Host]], *folders: str, **options: Any) -> Host:
    """A host without acl where other pythons come first on PATH (of pyenv, and in ``folders``), in an inventory that names no
    interpreter.
    """
    (host,) = sparks(1, without=["acl"], **options)
    for name in ("python3", "python3.14", "python3.13", "python3.12", "python3.11", "python"):
        for folder in ("/home/spark/.pyenv/shims", *folders):
            host.put(f"{folder}/{name}", BOGUS_PYTHON, 0o755)
    host.put("/home/spark/.bashrc", "export PATH=$HOME/.pyenv/shims:$PATH\n")
    path = Path(host.lab.inventory, "hosts.yml")
    inventory = yaml.safe_load(path.read_text())
    del inventory["sparks"]["vars"]["ansible_python_interpreter"]
    path.write_text(yaml.safe_dump(inventory))
    return host


@pytest.mark.parametrize(("pipelining", "requiretty"), [("True", False), ("False", False), ("False", True)])
def test_requiretty_no_acl_bogus_python_and_pyenv(
    sparks: Callable[..., list[Host]], pipelining: str, requiretty: bool
) -> None:
    """Nothing special is needed of a host: the distribution's python3, sudo, sh."""
    host = hardened(sparks, "/usr/local/bin", requiretty=requiretty)
    assert "this is no python" in host.run("python3 -V", user="spark", check=False).err
    result = harness.play(host.lab, tags="verify", env={"ANSIBLE_PIPELINING": pipelining}, extra_vars=REAL_GATE)
    assert sound(result, host.name)
    assert result.task(host.name, LOOK)["host"]["python"]["executable"] == "/usr/bin/python3"


def test_everything_without_pipelining_and_acl_where_sudo_demands_a_terminal(sparks: Callable[..., list[Host]]) -> None:
    """The whole way to a served Spark, and again without a change: build, fetch, switch and smoke."""
    host = hardened(sparks, requiretty=True)
    without = {"ANSIBLE_PIPELINING": "False"}
    first = harness.play(host.lab, env=without)
    assert first.rc == 0, first.text
    assert sound(first, host.name)
    assert first.task(host.name, LOOK)["host"]["python"]["executable"] == "/usr/bin/python3"
    assert "deepseek-v4-flash" in host.run(["curl", "-s", "http://127.0.0.1:8000/v1/models"]).out
    second = harness.play(host.lab, env=without)
    assert (second.rc, second.changed(host.name)) == (0, [])


def test_a_terminal_that_sudo_demands_is_told(sparks: Callable[..., list[Host]]) -> None:
    (host,) = sparks(1, requiretty=True)
    result = verify(host.lab)
    assert findings(result, host.name) == ["probe"]
    assert "ansible_pipelining: false" in result.failed(host.name)[-1]
    with host_variables(host.lab, spark1={"ansible_pipelining": False}):
        assert sound(verify(host.lab), host.name)
