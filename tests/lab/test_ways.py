"""Ways to start: on the box itself, from a laptop, from another folder or another project; and on a machine that is no Spark."""

from __future__ import annotations

import os
import platform
import pwd
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pexpect  # type: ignore[import-untyped]
import pytest
import yaml

from lab import harness, system
from lab.api import Host, Lab
from lab.hosts import SUDO_PASSWORD

pytestmark = pytest.mark.lab

REPOSITORY = Path(system.REPOSITORY)
LOCAL = {
    "sparks": {
        "hosts": {"localhost": {"ansible_connection": "local", "ansible_python_interpreter": "/usr/bin/python3"}}
    }
}
# What tools/venv.sh calls the mark of a finished environment.
STAMP = '"$(cat requirements/*.txt tools/venv.sh | cksum | cut -d" " -f1)"'
no_spark = pytest.mark.skipif(
    platform.machine() == "aarch64" or os.path.exists("/opt/ds4"), reason="not run: this machine could be a Spark"
)


def clone(target: Path) -> Path:
    """The working tree as git would clone it, under another name."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE).stdout.split(
        b"\0"
    )
    for name in filter(None, map(os.fsdecode, names)):
        source, copy = REPOSITORY / name, target / name
        if source.is_symlink() or source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy, follow_symlinks=False)
    return target


def lab_variables(lab: Lab) -> dict[str, object]:
    """What differs on a simulated Spark, as one flat file of variables."""
    values: dict[str, object] = {}
    for path in sorted((REPOSITORY / "inventory/lab/group_vars/all").glob("*.yml")):
        values.update(yaml.safe_load(path.read_text()))
    addresses = yaml.safe_load(Path(lab.inventory, "hosts.yml").read_text())["sparks"]["vars"]
    return {**values, **{name: value for name, value in addresses.items() if name.startswith("lab_")}}


# ------------------------------------------------------------------------------------------- this very machine


def refuses(text: str) -> None:
    """The one message of a machine that is no Spark, and nothing changed."""
    assert len(set(re.findall(r"localhost: \d+ problems; nothing was touched\.", text))) == 1
    for words in ("found:    x86_64", "override: host_verify_allow: [architecture]", "changed=0"):
        assert words in text
    for path in ("/opt/ds4", "/var/lib/ds4", "/etc/systemd/system/ds4.service"):
        assert not os.path.lexists(path)
    with pytest.raises(KeyError):
        pwd.getpwnam("ds4")


@no_spark
def test_the_default_inventory_on_a_machine_that_is_no_spark() -> None:
    ran = subprocess.run(
        ["ansible-playbook", "site.yml"],
        cwd=REPOSITORY,
        env={**os.environ, **harness.environment(), "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    refuses(ran.stdout + ran.stderr)


@no_spark
@pytest.mark.parametrize("venv", [".venv", ".venv-oldest"])
def test_from_another_project_in_another_folder(tmp_path: Path, venv: str) -> None:
    """A clone with a blank in its name, imported by a project with a configuration of its own, started from /."""
    if not (REPOSITORY / venv / "bin/ansible-playbook").exists():
        pytest.skip(f"not run: {venv} is not there (make test makes it)")
    copy = clone(tmp_path / "My Sparks (copy)")
    project = tmp_path / "project"
    project.mkdir()
    (project / "ansible.cfg").write_text("[defaults]\n")
    (project / "inventory.yml").write_text(yaml.safe_dump(LOCAL))
    (project / "everything.yml").write_text(yaml.safe_dump([{"import_playbook": str(copy / "site.yml")}]))
    ran = subprocess.run(
        ["ansible-playbook", "-i", str(project / "inventory.yml"), str(project / "everything.yml")],
        cwd="/",
        env={**os.environ, **harness.environment(venv), "ANSIBLE_CONFIG": str(project / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    refuses(ran.stdout + ran.stderr)
    assert "DEPRECATION" not in ran.stdout + ran.stderr


# ---------------------------------------------------------------------------------------------- from a laptop


def environment_in(copy: Path) -> None:
    """The virtual environment that runs us, as `make venv` would leave it in a clone."""
    (copy / ".venv").mkdir()
    for part in Path(sys.prefix).iterdir():
        if not part.name.startswith(".ds4-"):
            (copy / ".venv" / part.name).symlink_to(part)
    subprocess.run(["sh", "-c", f"touch .venv/.ds4-operator-{STAMP}"], cwd=copy, check=True)


def test_from_a_laptop(spark: Host, tmp_path: Path) -> None:
    """`make plan`, `make apply` and `make status` with HOST=user@address, with nothing but ssh's own configuration."""
    copy = clone(tmp_path / "ds4-fleet")
    environment_in(copy)
    copy.chmod(0o777)  # as everything below /mnt/c looks in WSL; Ansible would pass over the ansible.cfg in there
    variables = tmp_path / "lab.yml"
    variables.write_text(yaml.safe_dump(lab_variables(spark.lab)))
    ssh = f"-i {spark.lab.private_key} -o UserKnownHostsFile={spark.lab.known_hosts} -o StrictHostKeyChecking=yes"
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "ANSIBLE_"))}
    env = {**outer, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_SSH_COMMON_ARGS": ssh}

    def make(goal: str, *words: str) -> str:
        argv = ["make", goal, f"HOST=spark@{spark.address}", f"ARGS=-e @{variables}", *words]
        ran = subprocess.run(argv, cwd=copy, env=env, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    planned = make("plan")
    assert f"{spark.address} " in planned
    assert "host_verify     ok" in planned  # the table is a matter of ansible.cfg
    assert not spark.exists("/opt/ds4")
    begun = make("apply", "DETACH=1")
    process, log = re.findall(r"Running as process (\d+)\. Follow it with: tail -f (\S+)", begun)[0]
    deadline = time.monotonic() + 300
    while Path("/proc", process).exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    text = (copy / log).read_text()
    assert re.search(r"changed=[1-9]\d* .*failed=0", text), text
    assert "deepseek-v4-flash" in spark.run(["curl", "-s", "http://127.0.0.1:8000/v1/models"]).out
    again = make("apply")
    assert re.search(rf"{re.escape(spark.address)} .*changed=0 .*failed=0", again), again
    assert f"{spark.address} " in make("status")


# --------------------------------------------------------------------------------------------- on the box itself


def controller_on(host: Host, home: str) -> None:
    """Clone and virtual environment on the host, as `git clone` and `make venv` would leave them with a network."""
    packages = REPOSITORY / ".venv-oldest/lib/python3.11/site-packages"
    target = Path(host.path(home), "ds4-fleet")
    clone(target)
    host.run(["sh", "-c", f"cd {home}/ds4-fleet && /usr/bin/python3 -m venv --without-pip .venv"])
    inside = target / ".venv/lib/python3.11/site-packages"
    unneeded = (
        "mypy*",
        "*mypyc*",
        "hf_xet*",
        "pip*",
        "hypothesis*",
        "ansible_test",
        "pygments*",
        "setuptools*",
        "*lint*",
    )
    shutil.copytree(packages, inside, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", *unneeded))
    for name in ("ansible", "ansible-playbook"):
        module = "adhoc" if name == "ansible" else "playbook"
        program = f"#!{home}/ds4-fleet/.venv/bin/python3\nimport sys\nfrom ansible.cli.{module} import main\nsys.exit(main())\n"
        host.put(f"{home}/ds4-fleet/.venv/bin/{name}", program, 0o755)
    host.run(
        ["sh", "-c", f"cd {home}/ds4-fleet && touch .venv/.ds4-operator-{STAMP} && chown -R spark: {home}/ds4-fleet"]
    )


@pytest.mark.skipif(not (REPOSITORY / ".venv-oldest").exists(), reason="not run: no Python 3.11 environment here")
def test_on_the_box_itself_with_a_sudo_password(sparks: Callable[..., list[Host]]) -> None:
    """`make apply` typed by the owner: local connection, the distribution's python3, sudo asks once; then again: nothing."""
    (host,) = sparks(1, sudo="password")
    controller_on(host, "/home/spark")
    # A source that is gone does not matter to a host that has every package.
    host.put("/etc/apt/sources.list.d/gone.list", "deb http://127.0.0.1:9/gone stable main\n")
    host.put("/home/spark/lab.yml", yaml.safe_dump(lab_variables(host.lab)))
    first = typed(host, "cd ds4-fleet && make apply ARGS='-e @/home/spark/lab.yml'")
    assert "failed=0" in first, first
    assert SUDO_PASSWORD not in first
    answer = host.run(["curl", "-s", "http://127.0.0.1:8000/v1/models"]).out
    assert "deepseek-v4-flash" in answer
    started = host.run("systemctl show ds4 -p ExecMainStartTimestampMonotonic").out
    second = typed(host, "cd ds4-fleet && make apply ARGS='-e @/home/spark/lab.yml'")
    assert "changed=0" in second and "failed=0" in second, second
    assert host.run("systemctl show ds4 -p ExecMainStartTimestampMonotonic").out == started


def typed(host: Host, command: str, seconds: float = 300) -> str:
    """Run a command in a login terminal of the owner, giving the sudo password when asked; what was shown."""
    argv = host.ssh_command("spark")
    argv.insert(1, "-tt")
    terminal = pexpect.spawn(argv[0], [*argv[1:], command], encoding="utf-8", timeout=seconds, dimensions=(50, 250))
    shown = ""
    try:
        while terminal.expect(["BECOME password.*: ", pexpect.EOF]) == 0:
            shown += str(terminal.before)
            terminal.sendline(SUDO_PASSWORD)
        return shown + str(terminal.before)
    finally:
        terminal.close(force=True)
