"""`make venv` where no suitable Python is: it names the one command that brings one, for the system it runs on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools/venv.sh"
TOOLS = ("sh", "cat", "cksum", "cut", "dirname", "rm", "sed")
APT = '#!/bin/sh\n[ "$1 $2" = "show python{version}-venv" ]\n'


def venv(
    tmp_path: Path, level: str = "operator", want: str = "newest", **commands: str
) -> subprocess.CompletedProcess[str]:
    """Run the script where only ``commands`` (name with ``_`` for ``-`` → script) and a python3 of another version are."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(str(shutil.which(name)))
    commands.setdefault("python3", "#!/bin/sh\nexit 1\n")
    for name, text in commands.items():
        path = folder / name.replace("_", "-")
        path.write_text(text)
        path.chmod(0o755)
    env = {"PATH": str(folder), "HOME": str(tmp_path)}
    argv = [str(folder / "sh"), str(SCRIPT), str(tmp_path / "venv"), level, want]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("commands", "cure"),
    [
        # Ubuntu 22.04: python3 is 3.10, and `apt-get install python3-venv` would change nothing.
        (
            {"apt_get": "", "apt_cache": APT.format(version="3.11")},
            "sudo apt-get install -y python3.11 python3.11-venv",
        ),
        (
            {"apt_get": "", "apt_cache": APT.format(version="3.12")},
            "sudo apt-get install -y python3.12 python3.12-venv",
        ),
        ({"apt_get": "", "apt_cache": "#!/bin/sh\nexit 100\n"}, "sudo apt-get update, then again"),
        ({"brew": ""}, "brew install python@3.13"),
        ({"uv": ""}, "uv python install 3.13"),
        ({}, "install Python 3.11, 3.12 or 3.13 with its venv module"),
    ],
)
def test_no_suitable_python_names_the_command(tmp_path: Path, commands: dict[str, str], cure: str) -> None:
    ran = venv(tmp_path, **commands)
    assert ran.returncode == 1
    assert f"Required: 3.11, 3.12 or 3.13 with venv. Cure: {cure}" in ran.stderr
    assert not (tmp_path / "venv").exists()


def test_the_oldest_is_not_run_where_it_cannot_be(tmp_path: Path) -> None:
    ran = venv(tmp_path, "test", "oldest")
    assert (ran.returncode, ran.stderr) == (3, "No Python 3.11 with venv here.\n")


def test_root_gets_for_tests_what_apt_has(tmp_path: Path) -> None:
    """What is installed is said; when it does not help, the script ends instead of going on with another Python."""
    asked = tmp_path / "asked"
    ran = venv(
        tmp_path,
        "test",
        apt_get=f'#!/bin/sh\necho "$@" >{asked}\n',
        apt_cache=APT.format(version="3.12"),
        id="#!/bin/sh\necho 0\n",
    )
    assert ran.returncode == 1
    assert ran.stdout == "Installing Debian packages: python3.12 python3.12-venv\n"
    assert asked.read_text() == "install -y --no-install-recommends python3.12 python3.12-venv\n"
    assert "Still no suitable Python. Cure: sudo apt-get install -y python3.12 python3.12-venv" in ran.stderr


def test_a_suitable_python_that_is_there_is_taken(tmp_path: Path) -> None:
    """The interpreter is asked, not its name: here python3 says that it is 3.12, and makes the folder."""
    python = f"""#!/bin/sh
case $1 in
  -c) case $2 in *"(3, 12)"*) exit 0 ;; *) exit 1 ;; esac ;;
  --version) echo Python 3.12.0 ;;
  -m) {shutil.which("mkdir")} -p "$4/bin" && {shutil.which("ln")} -s {shutil.which("true")} "$4/bin/python3" ;;
esac
"""
    ran = venv(tmp_path, python3=python)
    assert ran.returncode == 0, ran.stderr
    assert f"Python 3.12.0 at {tmp_path}/bin/python3, requirements/operator.txt" in ran.stdout
    assert len(list((tmp_path / "venv").glob(".ds4-operator-*"))) == 1
