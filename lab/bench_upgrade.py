"""Figures of an upgrade: a fleet by tag bump, the engine's own stop and start, and the same by plain commands over ssh.

Usage: python3 -m lab.bench_upgrade [--hosts 8]

Everything is measured in this one run, on the same hosts. The plain way is what people type: fetch, check out, make,
restart, wait for an answer. It verifies nothing, asks no question and keeps no way back.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from . import harness, system
from .api import Host, Lab
from .engine import releases
from .served import answers, record, serving, until

NAME = "bench"
OLD, NEW = "v0.6.5", "v0.6.6"
BATCHES = (1, 0.25, 1.0)  # the default rollout: one, a quarter, the rest
DOWNTIME_BAR = 2.0  # seconds beyond the engine's own stop and start
ANSWER = (
    '{"model": "deepseek-v4-flash", "messages": [{"role": "user", "content": "What is the capital of France?"}], '
    '"max_tokens": 64, "temperature": 0}'
)
# Seconds from the stop to the first good answer, by nothing but systemctl and curl.
RESTART = (
    "begun=$(date +%s%N); systemctl stop {unit}; systemctl start {unit}; "
    "until curl -sf --noproxy '*' -d {answer} http://127.0.0.1:8000/v1/chat/completions | grep -q Paris; do sleep 0.05; done; "
    "echo $(( ($(date +%s%N) - begun) / 1000000 ))"
)
PLAIN_UNIT = """[Service]
User=ds4
EnvironmentFile={environment}
WorkingDirectory={folder}
ExecStart={folder}/ds4-server {arguments}
Restart=always
RestartSec=1
"""


def restart_seconds(host: Host, unit: str) -> float:
    """Stop, start, first good answer of a unit, in seconds."""
    ran = host.run(RESTART.format(unit=unit, answer=shlex.quote(ANSWER)), timeout=180)
    return int(ran.out.split()[-1]) / 1000


def at_once(hosts: Sequence[Host], unit: str) -> dict[str, float]:
    """``restart_seconds`` of several hosts at the same time."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        found = pool.map(lambda host: (host.name, restart_seconds(host, unit)), hosts)
        return dict(found)


def batches(hosts: Sequence[Host]) -> list[list[Host]]:
    """The hosts as the default rollout takes them."""
    found: list[list[Host]] = []
    left = list(hosts)
    for size in BATCHES:
        number = size if isinstance(size, int) else max(1, int(size * len(hosts)))
        found.append(left[:number])
        left = left[number:]
    return [batch for batch in found if batch]


def upgrade(lab: Lab, release: str) -> float:
    """Seconds of ``ansible-playbook site.yml`` to a release."""
    took = harness.timed(lab, "site.yml", extra_vars={"ds4_release": release})
    wrong = [host.name for host in lab.hosts if serving(host) != release]
    if wrong:
        raise SystemExit(f"not on {release}: {wrong}")
    return took


def make_plain(host: Host) -> None:
    """What somebody has who never met this repository: a clone, a build and a unit with the same options."""
    manifest = json.loads(host.read("/opt/ds4/current/manifest.json"))
    folder = "/home/plain-ds4"
    host.run(
        f"systemctl disable --now ds4 && git clone -q {host.lab.engine.url} {folder} && cd {folder} && "
        f"git checkout -q {OLD} && make cuda-spark >/dev/null 2>&1",
        timeout=300,
    )
    unit = PLAIN_UNIT.format(
        environment="/opt/ds4/current/ds4.env", folder=folder, arguments=shlex.join(manifest["args"])
    )
    host.put("/etc/systemd/system/plain-ds4.service", unit)
    host.run("systemctl daemon-reload && systemctl start plain-ds4")


def plain_upgrade(host: Host, release: str) -> float:
    """The plain commands over ssh; seconds that the service was down."""
    build = f"cd /home/plain-ds4 && git fetch -q --tags && git checkout -q {release} && make cuda-spark >/dev/null 2>&1"
    script = f"{build} && {RESTART.format(unit='plain-ds4', answer=shlex.quote(ANSWER))}"
    ran = system.run([*host.ssh_command(), shlex.join(["sudo", "sh", "-c", script])], timeout=300)
    return int(ran.out.split()[-1]) / 1000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m lab.bench_upgrade", description=__doc__)
    parser.add_argument("--hosts", type=int, default=8, help="size of the fleet [8]")
    count = parser.parse_args().hosts
    if OLD not in releases() or NEW not in releases():
        raise SystemExit(f"the stand-in engine has no {OLD} and {NEW}")
    lab = Lab(NAME)
    lab.up(count, replace=True)
    try:
        first = upgrade(lab, OLD)
        own: dict[str, float] = {}
        for batch in batches(lab.hosts):  # as many at once as the rollout will switch at once
            rounds = [at_once(batch, "ds4") for _ in range(3)]
            own.update({host.name: statistics.median(found[host.name] for found in rounds) for host in batch})
        fleet = upgrade(lab, NEW)
        down = {host.name: float(record(host)["downtime_seconds"]) for host in lab.hosts}
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(make_plain, lab.hosts))
        for host in lab.hosts:
            until(lambda host=host: answers(host), f"the plain service of {host.name} answers", 120)  # type: ignore[misc]
        begun = time.monotonic()
        plain_down = [plain_upgrade(host, NEW) for host in lab.hosts]
        one_by_one = time.monotonic() - begun
        begun = time.monotonic()
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda host: plain_upgrade(host, OLD), lab.hosts))
        together = time.monotonic() - begun
    finally:
        lab.down()
    over = {name: down[name] - own[name] for name in down}
    worst = max(over, key=lambda name: over[name])
    met = over[worst] <= DOWNTIME_BAR
    row = {
        "hosts": count,
        "first_run_seconds": round(first, 1),
        "upgrade_seconds": round(fleet, 1),
        "plain_one_by_one_seconds": round(one_by_one, 1),
        "plain_all_at_once_seconds": round(together, 1),
        "times_plain_one_by_one": round(fleet / one_by_one, 2),
        "downtime_seconds": down,
        "own_stop_and_start_seconds": {name: round(value, 1) for name, value in own.items()},
        "plain_downtime_seconds": [round(value, 1) for value in plain_down],
        "worst_over_own_seconds": round(over[worst], 1),
        "bar": DOWNTIME_BAR,
        "met": "yes" if met else "NO",
    }
    for key, value in row.items():
        print(f"{key:28} {value}")
    print(json.dumps({"bench": "upgrade", "row": row}))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
