"""Run the checks of this repository by name and say plainly what passed, what failed and what was not run.

Usage: tools/check.py test | lint | unit | lab | molecule [NAME|all] | faults | bench | docs
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv/bin"
OLDEST = ROOT / ".venv-oldest/bin"
CORE_SCENARIOS = ("default", "alternative", "serving_mode", "failure")
GENERATORS = (
    "tools/gen_verify_docs.py",
    "tools/gen_settings_docs.py",
    "tools/gen_variables_docs.py",
    "tools/gen_serving_mode_docs.py",
)

passed: list[str] = []
failed: list[str] = []
not_run: list[str] = []


def step(name: str, argv: Sequence[str | Path], *, env: dict[str, str] | None = None, fails_on: str = "") -> None:
    """Run one command; its output goes through, and ``fails_on`` in it is a failure too (deprecation warnings)."""
    print(f"\n=== {name}", flush=True)
    started = time.monotonic()
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1", **(env or {})}
    found = False
    process = subprocess.Popen(
        [str(part) for part in argv],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        found = found or bool(fails_on and fails_on in line)
    code = process.wait()
    good = code == 0 and not found
    (passed if good else failed).append(name)
    reason = "" if good else f" (exit {code}{', ' + fails_on if found else ''})"
    print(f"--- {name}: {'passed' if good else 'FAILED'}{reason} in {time.monotonic() - started:.0f} s", flush=True)


def skip(name: str, why: str) -> None:
    not_run.append(f"{name}: {why}")
    print(f"\n=== {name}: not run, {why}", flush=True)


def lab_ready(name: str) -> bool:
    """The lab needs root and a few Debian packages; without root its tests are not run, never passed."""
    if os.geteuid() != 0:
        skip(name, "needs root for simulated Sparks")
        return False
    subprocess.run([BIN / "python3", "-m", "lab", "needs", "--install"], cwd=ROOT, check=True)
    return True


def lint() -> None:
    step("yamllint", [BIN / "yamllint", "--strict", "."])
    step("ruff", [BIN / "ruff", "check", "."])
    step("ruff format", [BIN / "ruff", "format", "--check", "."])
    step("mypy strict", [BIN / "mypy", "plugins", "lab", "tools", "tests"])
    if (BIN / "ansible-lint").exists():
        step("ansible-lint production", [BIN / "ansible-lint", "--offline", "--strict"])
    else:
        skip("ansible-lint production", "needs Python 3.12 or newer")
    for generator in GENERATORS:
        if (ROOT / generator).exists():
            step(f"drift {generator}", [BIN / "python3", generator, "--check"])


def docs() -> None:
    for generator in GENERATORS:
        if (ROOT / generator).exists():
            step(generator, [BIN / "python3", generator])


def unit() -> None:
    step("unit, newest ansible-core", [BIN / "pytest", "-q", "tests/unit"])
    made = subprocess.run([ROOT / "tools/venv.sh", ".venv-oldest", "test", "oldest"], cwd=ROOT, check=False)
    if made.returncode == 0:
        step(
            "unit, oldest ansible-core",
            [OLDEST / "pytest", "-q", "tests/unit"],
            env={"PATH": f"{OLDEST}:{os.environ['PATH']}"},
        )
    else:
        skip("unit, oldest ansible-core", "no Python 3.11 here")


def lab() -> None:
    if lab_ready("lab tests"):
        step(
            "lab tests",
            [BIN / "pytest", "-q", "-m", "lab and not faults", "tests/lab"],
            fails_on="[DEPRECATION WARNING]",
        )


def molecule(names: Sequence[str]) -> None:
    if not lab_ready("molecule"):
        return
    if list(names) == ["all"]:
        names = sorted(path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml"))
    for name in names:
        environment = {"MOLECULE_PROJECT_DIRECTORY": str(ROOT)}
        step(
            f"molecule {name}",
            [BIN / "molecule", "test", "-s", name],
            env=environment,
            fails_on="[DEPRECATION WARNING]",
        )


def molecule_oldest() -> None:
    if not (OLDEST / "molecule").exists():
        skip("molecule default, oldest ansible-core", "no Python 3.11 here")
    elif os.geteuid() == 0:
        environment = {"MOLECULE_PROJECT_DIRECTORY": str(ROOT), "PATH": f"{OLDEST}:{os.environ['PATH']}"}
        step(
            "molecule default, oldest ansible-core",
            [OLDEST / "molecule", "test", "-s", "default"],
            env=environment,
            fails_on="[DEPRECATION WARNING]",
        )


def faults() -> None:
    if lab_ready("random tests"):
        step("random tests", [BIN / "pytest", "-q", "-m", "faults", "tests/faults", "tests/lab"])


def bench() -> None:
    if lab_ready("bench"):
        for script in sorted((ROOT / "lab").glob("bench_*.py")):
            step(script.stem, [BIN / "python3", "-m", f"lab.{script.stem}"])


def test() -> None:
    os.environ.setdefault("FAULT_SEEDS", "2")
    lint()
    unit()
    molecule([name for name in CORE_SCENARIOS if (ROOT / "molecule" / name / "molecule.yml").exists()])
    molecule_oldest()
    lab()
    faults()


def main(arguments: Sequence[str]) -> int:
    commands: dict[str, Callable[[], None]] = {
        "test": test,
        "lint": lint,
        "unit": unit,
        "lab": lab,
        "faults": faults,
        "bench": bench,
        "docs": docs,
        "molecule": lambda: molecule(arguments[1:] or ["default"]),
    }
    if not arguments or arguments[0] not in commands:
        print(__doc__, file=sys.stderr)
        return 2
    if shutil.which("git") is None:
        print("git is missing. Cure: apt-get install git", file=sys.stderr)
        return 2
    started = time.monotonic()
    commands[arguments[0]]()
    print(f"\nIn {time.monotonic() - started:.0f} s")
    for line in not_run:
        print(f"not run: {line}")
    for line in failed:
        print(f"FAILED: {line}")
    print(f"{len(passed)} passed, {len(failed)} failed, {len(not_run)} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
