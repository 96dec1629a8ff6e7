"""The lab itself: what every other lab test rests on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import desktop, harness, hosts, memory, network, system
from lab.api import Host, Lab
from lab.system import LabError

pytestmark = pytest.mark.lab

GIB_KIB = 1024 * 1024
HARDENED = [
    *(
        "systemd-run",
        "--wait",
        "--pipe",
        "--quiet",
        "-p",
        "ProtectKernelTunables=yes",
        "-p",
        "ProtectControlGroups=yes",
    ),
    *("-p", "ProtectProc=invisible", "-p", "ProtectSystem=strict"),
]
PROBE = """
- hosts: sparks
  gather_facts: false
  become: true
  tasks:
    - name: Ping
      ansible.builtin.ping:
    - name: Say something
      ansible.builtin.command: "true"
      changed_when: true
    - name: Look
      ansible.builtin.stat:
        path: /etc/dgx-release
"""


def available(host: Host) -> int:
    """MemAvailable of the host (kB)."""
    return host.meminfo()["MemAvailable"]


def steady(host: Host) -> int:
    """MemAvailable (kB) once the simulated desktop of a fresh host has settled: three equal looks in a row, a second apart."""
    looks: list[int] = []

    def same() -> bool:
        looks.append(available(host))
        return len(looks) >= 3 and len(set(looks[-3:])) == 1

    system.wait(same, "memory is steady", timeout=60.0, period=1.0)
    return looks[-1]


def _is(host: Host, kib: int) -> Callable[[], bool]:
    return lambda: available(host) == kib


def settles(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait for something the simulator does within fractions of a second."""
    system.wait(condition, what, timeout=seconds, period=0.02)


# --- hosts


def test_two_hosts_boot_clean_and_are_reached_by_ssh(sparks: Callable[..., list[Host]]) -> None:
    first, second = sparks(2)
    for host in (first, second):
        assert host.run("systemctl is-system-running").out.strip() == "running"
        assert host.run("systemctl --failed --no-legend").out == ""
        assert host.run("hostname", user="spark").out.strip() == host.name
        assert host.run("sudo -n id -u", user="spark").out.strip() == "0"
        assert (
            host.run("systemd-run --user --wait --pipe --quiet head -n1 /proc/meminfo", user="spark").out.split()[1]
            == "127535152"
        )
        assert host.run("systemctl is-system-running").out.strip() == "running", "a login left a failed unit"
        assert host.run(["ping", "-c1", "-W2", str(host.lab.info["gateway"])]).rc == 0
    assert first.read("/etc/machine-id") != second.read("/etc/machine-id")
    assert first.run("cat /proc/sys/kernel/random/boot_id").out != second.run("cat /proc/sys/kernel/random/boot_id").out


def test_looks_like_a_stock_dgx_os(borrowed: Host) -> None:
    release = borrowed.read("/etc/dgx-release")
    assert release.count("DGX_OTA_VERSION=") > 1, "a parser must meet the repeated key"
    assert borrowed.read("/sys/class/dmi/id/product_name").strip() == "NVIDIA_DGX_Spark"
    assert borrowed.run("systemctl get-default").out.strip() == "graphical.target"
    assert borrowed.run(["systemctl", "is-active", "gdm3", "display-manager", "docker", "nvidia-persistenced"]).rc == 0
    for program in ("git", "make", "gcc", "g++", "curl", "nft", "setfacl", "python3"):
        assert borrowed.run(["which", program]).rc == 0
    borrowed.run(["python3", "-c", "import requests, apt"])


def test_multi_user_target_keeps_ssh_and_frees_the_desktop(spark: Host) -> None:
    before = steady(spark)
    spark.run("systemctl isolate multi-user.target", user="root")
    freed = sum(unit.mib for unit in desktop.SERVICES if unit.wanted_by == "graphical.target") * 1024
    settles(lambda: available(spark) == before + freed, "the desktop's memory is free")
    assert spark.run("true", user="spark").rc == 0


def test_processes_started_by_the_lab_are_the_hosts_own(spark: Host) -> None:
    spark.run("nohup sleep 4711 >/dev/null 2>&1 &")
    assert spark.run("pgrep -f 'sleep 4711'").out.strip()
    assert "lab.scope" in spark.run("cat /proc/self/cgroup").out
    spark.reset()
    assert spark.run("pgrep -f 'sleep 471[1]'", check=False).rc == 1


def test_reboot_keeps_the_disk_and_changes_the_boot(spark: Host) -> None:
    spark.put("/etc/kept", "yes\n", 0o600)
    boot = spark.read("/proc/sys/kernel/random/boot_id")
    spark.reboot()
    assert spark.read("/etc/kept") == "yes\n"
    assert spark.run("stat -c %a /etc/kept").out.strip() == "600"
    assert spark.read("/proc/sys/kernel/random/boot_id") != boot
    assert spark.meminfo()["MemTotal"] == memory.DEFAULTS["total"]


def test_power_cut_and_return(spark: Host) -> None:
    spark.put("/root/kept", "yes\n")
    spark.power_off()
    assert spark.leader is None
    with pytest.raises(LabError, match="is down"):
        spark.run("true")
    spark.power_on()
    assert spark.exists("/root/kept")


def test_pause_stops_every_process_and_resume_goes_on(spark: Host) -> None:
    spark.run("systemd-run --unit=tick sh -c 'while :; do date +%s%N >/run/tick; sleep 0.05; done'")
    settles(lambda: spark.exists("/run/tick"), "it ticks")
    spark.pause()
    tick = Path(spark.path("/run/tick"))
    frozen = tick.read_text()
    time.sleep(0.4)
    assert tick.read_text() == frozen
    spark.resume()
    settles(lambda: tick.read_text() not in ("", frozen), "it ticks again")


def test_snapshot_and_reset(spark: Host) -> None:
    spark.put("/opt/first", "1\n")
    spark.run("chown spark /opt/first && setfacl -m u:daemon:r /opt/first")
    spark.snapshot()
    spark.put("/opt/second", "2\n")
    spark.run("rm /opt/first && rm -r /srv/lab-apt")
    spark.reset("snapshot")
    assert spark.run("stat -c %U /opt/first").out.strip() == "spark"
    assert "user:daemon:r--" in spark.run("getfacl /opt/first").out
    assert not spark.exists("/opt/second")
    spark.reset()
    assert not spark.exists("/opt/first")
    assert spark.exists("/srv/lab-apt")


# --- options


def test_options_of_the_login(sparks: Callable[..., list[Host]]) -> None:
    first, second = sparks(
        2, user="operator", per_host={"spark1": {"sudo": "password"}, "spark2": {"sudo": "none", "requiretty": True}}
    )
    assert first.run("sudo -n true", check=False, user="operator").rc != 0
    answer = first.run("sudo -S -p '' id -u", user="operator", stdin=hosts.SUDO_PASSWORD + "\n")
    assert answer.out.strip() == "0"
    assert second.run("sudo -n true", check=False, user="operator").rc != 0
    assert "requiretty" in second.read("/etc/sudoers.d/lab")
    listed = json.loads(Path(first.lab.inventory, "hosts.yml").read_text())["sparks"]["hosts"]
    assert {name: entry["ansible_user"] for name, entry in listed.items()} == {
        "spark1": "operator",
        "spark2": "operator",
    }


def test_packages_can_be_missing_and_installed_offline(sparks: Callable[..., list[Host]]) -> None:
    (spark,) = sparks(1, without=["make", "python3-requests"])
    assert spark.run("which make", check=False).rc == 1
    assert spark.run(["python3", "-c", "import requests"], check=False).rc == 1
    spark.run("apt-get -q update && apt-get install -y -q make python3-requests", timeout=120)
    spark.run(["python3", "-c", "import requests"])
    assert spark.run(["make", "--version"]).rc == 0


def test_needrestart_restarts_services_as_on_ubuntu(sparks: Callable[..., list[Host]]) -> None:
    """The danger is real here, so that a test of the product's care for it means something."""
    (spark,) = sparks(1, without=["acl"])
    spark.run(
        "cp /bin/sleep /usr/local/bin/old && systemd-run -q --unit=old --service-type=exec /usr/local/bin/old 600"
    )
    spark.run("rm /usr/local/bin/old && cp /bin/sleep /usr/local/bin/old")
    before = spark.run("systemctl show old -p MainPID").out
    spark.run("apt-get install -y -q acl", timeout=120)
    assert spark.run("systemctl show old -p MainPID").out != before


def test_bare_variants(sparks: Callable[..., list[Host]]) -> None:
    (spark,) = sparks(1, desktop=False, cuda=False, gpu={"state": "absent"}, memory={"base": 8 * GIB_KIB})
    assert not spark.exists("/usr/local/cuda")
    assert spark.run("which nvidia-smi", check=False).rc == 1
    assert spark.run("systemctl is-active gdm", check=False).out.strip() == "inactive"
    assert spark.run("systemctl get-default").out.strip() == "multi-user.target"
    settles(lambda: available(spark) == memory.DEFAULTS["total"] - 8 * GIB_KIB, "only the base is used")


def test_unknown_option_is_refused_before_anything_is_made() -> None:
    with pytest.raises(LabError, match=r"Unknown host options \['colour'\]"):
        Lab("never").up(1, colour="red")
    assert not os.path.exists(Lab("never").directory)


# --- memory


def test_memory_is_a_gb10s_and_moves_with_tenants(spark: Host) -> None:
    total = memory.DEFAULTS["total"]
    assert spark.meminfo()["MemTotal"] == total
    idle = total - memory.DEFAULTS["base"] - desktop.total_kib()
    settles(lambda: available(spark) == idle, "the desktop holds its share")
    spark.tenant("engine", 90 * GIB_KIB)
    settles(lambda: available(spark) == idle - 90 * GIB_KIB, "the tenant's share is taken")
    spark.tenant("engine", 0)
    settles(lambda: available(spark) == idle, "the tenant's share is back")
    spark.run(["systemctl", "stop", "gdm"])
    settles(lambda: available(spark) == idle + 6 * GIB_KIB, "a stopped unit gives its memory back")


def test_a_killed_process_gives_its_memory_back_and_a_lost_one_does_not(spark: Host) -> None:
    before = steady(spark)
    spark.run("systemd-run --unit=hog sh -c 'echo 1048576 $$$$ >/run/lab-tenants/hog; exec sleep 600'")
    settles(lambda: available(spark) == before - GIB_KIB, "the process holds memory")
    spark.run("systemctl kill --signal=KILL hog")
    settles(lambda: available(spark) == before, "the killed process holds none")
    spark.put("/run/lab-tenants/lingers", f"{GIB_KIB} until={time.time() + 1.5}\n")
    settles(lambda: available(spark) == before - GIB_KIB, "memory lingers")
    settles(lambda: available(spark) == before, "and comes back in time")


def test_hardened_units_see_the_same_memory_also_after_a_reboot(spark: Host) -> None:
    for _ in range(2):
        settles(lambda: available(spark) < memory.DEFAULTS["total"] - desktop.total_kib(), "the desktop is up")
        assert spark.run([*HARDENED, "cat", "/proc/meminfo"]).out == spark.read("/proc/meminfo")
        expected = available(spark) - GIB_KIB
        spark.run([*HARDENED, "sh", "-c", f"echo {GIB_KIB} >/run/lab-tenants/inside"])
        settles(_is(spark, expected), "a hardened unit announces itself")
        spark.reboot()
    assert not spark.exists("/run/lab-tenants/inside")


def test_memory_scene_and_page_cache(borrowed: Host) -> None:
    borrowed.memory(cached=90 * GIB_KIB, swap_total=0, fields={"MemFree": 3 * GIB_KIB})
    settles(lambda: borrowed.meminfo()["MemFree"] == 3 * GIB_KIB, "MemFree is as told")
    assert borrowed.meminfo()["SwapTotal"] == 0
    assert borrowed.meminfo()["Cached"] >= 90 * GIB_KIB
    with pytest.raises(LabError, match="unknown"):
        borrowed.memory(colour=1)


# --- GPU and toolkit

QUERY = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader"]


def test_nvidia_smi_of_a_gb10(borrowed: Host) -> None:
    assert borrowed.run(QUERY).out == "NVIDIA GB10, 12.1, 580.95.05, [N/A]\n"
    assert "CUDA Version: 13.0" in borrowed.run("nvidia-smi").out
    assert "Not Supported" in borrowed.run("nvidia-smi").out
    assert "VBIOS Version" in borrowed.run("nvidia-smi -q").out
    with_header = borrowed.run(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv"]).out
    assert with_header == "name, memory.total [MiB]\nNVIDIA GB10, [N/A]\n"


@pytest.mark.parametrize(
    ("control", "rc", "words"),
    [
        ({"state": "mismatch"}, 18, "Driver/library version mismatch"),
        ({"state": "no_driver"}, 9, "couldn't communicate with the NVIDIA driver"),
        ({"state": "no_device"}, 6, "No devices were found"),
        ({"state": "garbage"}, 0, "unexpected"),
        ({"state": "rc", "rc": 3, "text": "odd"}, 3, "odd"),
        (
            {"gpus": [{"name": "NVIDIA RTX PRO 6000", "compute_cap": "12.0", "memory.total": "97887"}]},
            0,
            "12.0, 580.95.05, 97887",
        ),
    ],
)
def test_nvidia_smi_faults(borrowed: Host, control: dict[str, object], rc: int, words: str) -> None:
    borrowed.gpu(**control)
    ran = borrowed.run(QUERY, check=False)
    assert ran.rc == rc
    assert words in ran.out


def test_nvidia_smi_absent_several_and_hanging(borrowed: Host) -> None:
    borrowed.gpu(state="absent")
    assert borrowed.run("command -v nvidia-smi", check=False).rc == 127
    borrowed.gpu(gpus=[{}, {"uuid": "GPU-2"}])
    assert len(borrowed.run(QUERY).out.splitlines()) == 2
    borrowed.gpu(state="hang")
    # As a wedged driver does, it outlives a polite end.
    assert borrowed.run(["timeout", "-k", "0.5", "0.5", *QUERY], check=False).rc == 137
    with pytest.raises(LabError, match="unknown"):
        borrowed.gpu(colour="red")


def test_toolkit_compiles_for_the_spark(borrowed: Host) -> None:
    borrowed.put("/tmp/k.cu", "__global__ void k(int *x) { *x += 1; }\nint main() { return 0; }\n")
    arch = "arch=compute_121a,code=sm_121a"
    borrowed.run(f"cd /tmp && /usr/local/cuda/bin/nvcc -gencode {arch} -fatbin -o k.fatbin k.cu", timeout=120)
    assert borrowed.run("/usr/local/cuda/bin/cuobjdump /tmp/k.fatbin | grep arch").out.split() == [
        "arch",
        "=",
        "sm_121a",
    ]
    assert borrowed.run("touch /usr/local/cuda/bin/x", check=False).rc != 0, "the toolkit is read-only"
    assert borrowed.run("which nvcc", check=False).rc == 1, "as on DGX OS, a plain PATH has no nvcc"


# --- network and disks


def test_hosts_are_isolated_from_the_outside(borrowed: Host) -> None:
    assert borrowed.run("ip -4 route show default").out == ""
    assert borrowed.run(["ping", "-c1", "-W1", "192.0.2.1"], check=False).rc != 0


def test_link_down_and_up(spark: Host) -> None:
    spark.link_down()
    started = time.monotonic()
    assert spark.run("true", user="spark", check=False, timeout=20).rc == 255
    assert time.monotonic() - started >= 3, "a pulled cable is silence, not a refusal"
    spark.link_up()
    settles(lambda: spark.run("true", user="spark", check=False).rc == 0, "ssh answers again")


def test_link_rate(borrowed: Host) -> None:
    fetch = f"curl -s -o /dev/null -w '%{{time_total}}' {_some_file(borrowed.lab)}"

    def best_of(count: int) -> float:
        return min(float(borrowed.run(fetch).out) for _ in range(count))

    fast = best_of(3)
    borrowed.link_rate("100mbit")
    slow = best_of(2)
    borrowed.link_rate(None)
    assert 0.4 < slow < 1.0, f"6 MiB at 100 Mbit/s take half a second, not {slow}"
    assert fast < slow / 2 > best_of(3)


def _some_file(lab: Lab) -> str:
    """URL of a file of 6 MiB beside the hosts, without redirect."""
    lab.hub.options(direct=True)
    manifest = __import__("lab.hub.weights", fromlist=["manifest"]).manifest()
    drafter = manifest["0731"]["drafter"]
    return f"{lab.hub.url}/{drafter['repo']}/resolve/{drafter['revision']}/{drafter['file']}"


def test_small_disk_in_a_running_host(spark: Host) -> None:
    spark.mount_small_disk("/srv/small", 8)
    assert spark.run("findmnt -no FSTYPE /srv/small").out.strip() == "ext4"
    assert "No space left" in spark.run("head -c 16M /dev/zero >/srv/small/x", check=False).err
    size = int(spark.run("stat -c %s /srv/small/x").out)
    assert 4 << 20 < size < 8 << 20
    # Seen by services too, hardened ones included.
    assert spark.run([*HARDENED, "stat", "-c", "%s", "/srv/small/x"]).out.strip() == str(size)
    spark.run("umount /srv/small")
    assert spark.lab.name not in system.run(["losetup", "--list"]).out


def test_disk_option_survives_a_reboot(sparks: Callable[..., list[Host]]) -> None:
    (spark,) = sparks(1, disks={"/var/lib/ds4": 16})
    spark.put("/var/lib/ds4/kept", "yes\n")
    spark.reboot()
    assert spark.read("/var/lib/ds4/kept") == "yes\n"
    assert int(spark.run("df --output=size -k /var/lib/ds4 | tail -1").out) < 16 << 10


# --- Ansible


def test_harness_events_and_module_executions(sparks: Callable[..., list[Host]], tmp_path: Path) -> None:
    first, second = sparks(2)
    book = tmp_path / "probe.yml"
    book.write_text(PROBE)
    since = time.time()
    result = harness.play(first.lab, str(book), limit="spark2", touches=["spark2"])
    assert result.rc == 0, result.text
    assert result.changed("spark2") == ["Say something"]
    assert result.task("spark2", "Look")["stat"]["exists"] is True
    assert second.module_executions(since) == ["ping", "command", "stat"]
    assert first.module_executions(since) == []
    assert second.module_executions(time.time()) == []


def test_harness_refuses_a_run_that_touched_no_host(borrowed: Host, tmp_path: Path) -> None:
    book = tmp_path / "nobody.yml"
    book.write_text("- hosts: nobody\n  tasks: []\n")
    with pytest.raises(AssertionError, match="touched no host"):
        harness.play(borrowed.lab, str(book))


def test_unreachable_host_is_a_result(sparks: Callable[..., list[Host]], tmp_path: Path) -> None:
    first, second = sparks(2)
    second.link_down()
    book = tmp_path / "probe.yml"
    book.write_text(PROBE)
    result = harness.play(first.lab, str(book), touches=["spark1", "spark2"])
    assert result.rc != 0
    assert result.failed("spark1") == []
    assert len(result.results("spark2", "unreachable")) == 1


# --- services


def test_engine_repository_and_hub_are_reached_from_the_hosts(borrowed: Host) -> None:
    listed = borrowed.run(["git", "ls-remote", "--tags", borrowed.lab.engine.url]).out
    assert "refs/tags/v0.6.5" in listed
    assert (
        borrowed.run(["curl", "-sI", "-o", "/dev/null", "-w", "%{http_code}", borrowed.lab.hub.url + "/none"]).out
        == "404"
    )
    urls = json.loads(Path(borrowed.lab.inventory, "hosts.yml").read_text())["sparks"]["vars"]
    assert (urls["lab_engine_url"], urls["lab_hub_url"]) == (borrowed.lab.engine.url, borrowed.lab.hub.url)


# --- the instance as a whole


@pytest.fixture
def other(lab_session: Lab) -> Lab:
    """A second instance's name, free of leftovers after the test whatever happens."""
    return Lab(f"{lab_session.name}-other")


def traces(lab: Lab, subnet: int) -> list[str]:
    """Everything on this machine that still belongs to the instance."""
    found = [path for path in (lab.directory, system.cgroup(lab.name)) if os.path.exists(path)]
    found += [
        name for name in os.listdir("/sys/class/net") if name == network.bridge_name(subnet) or f"-l{subnet}-" in name
    ]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if f"/{lab.name}/" in line]
    found += [
        line for line in system.run(["losetup", "--list", "--noheadings"]).out.splitlines() if f"/{lab.name}/" in line
    ]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", pid, "cmdline").read_bytes()
        except OSError:
            continue
        if f"/{lab.name}/".encode() in words:
            found.append(words.replace(b"\0", b" ").decode())
    return found


def machine_network() -> str:
    """Forwarding and firewall of this machine."""
    rules = system.run(["nft", "list", "ruleset"], check=False).out
    return Path("/proc/sys/net/ipv4/ip_forward").read_text() + rules


def test_two_instances_at_once_and_nothing_left_of_one(spark: Host, other: Lab) -> None:
    before = machine_network()
    try:
        other.up(2, disks={"/srv/disk": 8})
        subnet = int(other.info["subnet"])
        assert subnet != int(spark.lab.info["subnet"])
        assert {host.address for host in other.hosts}.isdisjoint({host.address for host in spark.lab.hosts})
        other.hosts[0].mount_small_disk("/srv/live", 8)
        assert traces(other, subnet)
        with pytest.raises(LabError, match=f"The instance {other.name} runs"):
            other.up(1)
        assert machine_network() == before
    finally:
        other.down()
    assert traces(other, subnet) == []
    assert machine_network() == before
    assert spark.run("true", user="spark").rc == 0
    other.down()  # of what is not there: no error


def test_crashed_instance_is_cleaned_by_the_next_up(other: Lab) -> None:
    try:
        other.up(1)
        old = other.hosts[0]
        assert old.leader
        for pid in system.cgroup_pids(system.cgroup(other.name)):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd-nspawn":
                os.kill(pid, signal.SIGKILL)
        settles(lambda: old.leader is None, "the payload died with systemd-nspawn")
        assert not other.running
        other.up(1)
        assert other.hosts[0].run("true", user="spark").rc == 0
        subnet = int(other.info["subnet"])
    finally:
        other.down()
    assert traces(other, subnet) == []


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LabError, match="The lab needs root"):
        Lab("nobody").up(1)


def test_command_line(spark: Host) -> None:
    def lab(*words: str, **more: object) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "lab", *words]
        return subprocess.run(argv, cwd=system.REPOSITORY, text=True, capture_output=True, check=False, **more)  # type: ignore[call-overload,no-any-return]

    name = ["--name", spark.lab.name]
    assert spark.address in lab("status").stdout
    assert lab("shell", *name, "spark1", "--", "hostname").stdout == "spark1\n"
    assert "Started" in lab("logs", *name, "spark1", "ssh.service").stdout
    assert lab("gpu", *name, "spark1", "state=mismatch").returncode == 0
    assert spark.run(QUERY, check=False).rc == 18
    missing = lab("shell", *name, "spark9", "true")
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
    assert "There is no host spark9" in missing.stderr
    lacking = lab("needs", env={**os.environ, "PATH": "/usr/bin/../nowhere"})
    assert lacking.returncode == 1
    assert "mmdebstrap" in lacking.stdout
