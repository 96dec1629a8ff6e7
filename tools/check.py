"""Run the checks of this repository by name and say plainly what passed, what failed and what was not run.

Usage: tools/check.py test | lint | unit | lab | molecule [NAME|all] | faults | bench | docs
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv/bin"
OLDEST = ROOT / ".venv-oldest/bin"
CORE_SCENARIOS = ("default", "alternative")
# Of the switch: a bad release that returns, a controller that dies, an engine that is taken over. The rest is in `make lab-test`.
CORE_SWITCH = (
    "test_a_bad_release_puts_itself_back[garbage-]",
    "test_a_controller_that_dies_in_the_middle_is_not_needed",
    "test_a_foreign_engine_is_adopted_when_asked",
)
CORE_LAB = (
    "tests/lab/test_lab.py",
    "tests/lab/test_verify.py",
    "tests/lab/test_never.py",
    *(f"tests/lab/test_deployments.py::{name}" for name in CORE_SWITCH),
)
CORE_FAULTS = ("tests/faults/test_fetch_faults.py", "tests/lab/test_converge.py")
DEPRECATED = "[DEPRECATION WARNING]"
NO_TESTS = "no tests found"  # molecule passes over a scenario without tests, with success
GENERATORS = (
    "tools/gen_verify_docs.py",
    "tools/gen_settings_docs.py",
    "tools/gen_variables_docs.py",
    "tools/gen_serving_mode_docs.py",
)

LOGS = ROOT / ".cache/logs"

passed: list[str] = []
failed: list[str] = []
not_run: list[str] = []
told = threading.Lock()
in_lanes = threading.Event()  # several steps at once: their output goes to files, and is shown only for a failure


def step(
    name: str, argv: Sequence[str | Path], *, env: dict[str, str] | None = None, fails_on: Sequence[str] = ()
) -> None:
    """Run one command; any of ``fails_on`` in its output is a failure too (deprecation warnings, tests that are not there)."""
    say(f"=== {name}")
    started = time.monotonic()
    # What make tells its children must not reach the makes that tests start.
    outer = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    environment = {**outer, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1", **(env or {})}
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / (re.sub(r"[^a-z0-9]+", "-", name.lower()) + ".log")
    process = subprocess.Popen(
        [str(part) for part in argv],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    with log.open("w", encoding="utf-8") as stream:
        for line in process.stdout:
            stream.write(line)
            if not in_lanes.is_set():
                print(line, end="", flush=True)
    code = process.wait()
    text = log.read_text(encoding="utf-8")
    found = [words for words in fails_on if words in text]
    good = code == 0 and not found
    (passed if good else failed).append(name)
    reason = "" if good else f" ({', '.join([f'exit {code}', *found])})"
    summary = [line for line in text.splitlines() if re.search(r"\d+ (passed|failed)", line)][-1:]
    if in_lanes.is_set() and not good:
        say(f"{text}\nThat was {name}.")
    said = f", {summary[0].strip(' =')}" if summary else ""
    say(f"--- {name}: {'passed' if good else 'FAILED'}{reason} in {time.monotonic() - started:.0f} s{said}")


def say(text: str) -> None:
    with told:
        print(text, flush=True)


def lanes(*works: Callable[[], None]) -> None:
    """Run several works side by side: they mostly wait for hosts."""
    say(f"Output of each step goes to {LOGS.relative_to(ROOT)}/ and is shown here when it fails.")
    in_lanes.set()
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def skip(name: str, why: str) -> None:
    not_run.append(f"{name}: {why}")
    say(f"--- {name}: not run, {why}")


def lab_ready(name: str) -> bool:
    """The lab needs root and a few Debian packages; without root its tests are not run, never passed."""
    if os.geteuid() != 0:
        skip(name, "needs root for simulated Sparks")
        return False
    subprocess.run([BIN / "python3", "-m", "lab", "needs", "--install"], cwd=ROOT, check=True)
    return True


def on_lab(work: Callable[[], None]) -> Callable[[], None]:
    return lambda: work() if lab_ready("simulated Sparks") else None


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


def oldest() -> bool:
    """Is there a virtual environment with the oldest supported ansible-core, or can there be one?"""
    made = subprocess.run([ROOT / "tools/venv.sh", ".venv-oldest", "test", "oldest"], cwd=ROOT, check=False)
    if made.returncode != 0:
        skip("oldest ansible-core", "no Python 3.11 here")
    return made.returncode == 0


def unit() -> None:
    step("unit, newest ansible-core", [BIN / "pytest", "-q", "tests/unit"])
    if oldest():
        step("unit, oldest ansible-core", [OLDEST / "pytest", "-q", "tests/unit"], env=on_path(OLDEST))


def on_path(binaries: Path) -> dict[str, str]:
    return {"PATH": f"{binaries}:{os.environ['PATH']}"}


def lab(files: Sequence[str] = ("tests/lab",)) -> None:
    step("lab tests", [BIN / "pytest", "-q", "-m", "lab and not faults", *files], fails_on=[DEPRECATED])


def molecule(names: Sequence[str], binaries: Path = BIN) -> None:
    if list(names) == ["all"]:
        names = sorted(path.parent.name for path in (ROOT / "molecule").glob("*/molecule.yml"))
    for name in names:
        step(
            f"molecule {name}{', oldest ansible-core' if binaries == OLDEST else ''}",
            [binaries / "molecule", "test", "-s", name],
            env={"MOLECULE_PROJECT_DIRECTORY": str(ROOT), **on_path(binaries)},
            fails_on=[DEPRECATED, NO_TESTS],
        )


def faults(files: Sequence[str] = ("tests/faults", "tests/lab")) -> None:
    step("random tests", [BIN / "pytest", "-q", "-m", "faults", *files])


def bench() -> None:
    for script in sorted((ROOT / "lab").glob("bench_*.py")):
        step(script.stem, [BIN / "python3", "-m", f"lab.{script.stem}"])


def test() -> None:
    """The parts that a change must pass, in 25 minutes on two cores; everything else is in lab, molecule and faults."""
    os.environ.setdefault("FAULT_SEEDS", "1")
    ready = lab_ready("simulated Sparks")
    made_oldest = oldest()

    def first() -> None:
        lint()
        if ready:
            molecule(CORE_SCENARIOS)
            if made_oldest:
                molecule(["default"], OLDEST)

    def second() -> None:
        unit()
        if ready:
            lab(CORE_LAB)
            faults(CORE_FAULTS)

    lanes(first, second)


def main(arguments: Sequence[str]) -> int:
    commands: dict[str, Callable[[], None]] = {
        "test": test,
        "lint": lint,
        "unit": unit,
        "lab": on_lab(lab),
        "faults": on_lab(faults),
        "bench": on_lab(bench),
        "docs": docs,
        "molecule": on_lab(lambda: molecule(arguments[1:] or ["all"])),
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
