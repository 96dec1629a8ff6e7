"""Figures of the playbook: a run with nothing to do on 1, 4 and 16 simulated Sparks, as multiples of a one-task ping play.

Usage: python3 -m lab.bench_site [--hosts 1,4,16]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time

from . import harness
from .api import Lab

NAME = "bench"
PING = "- {hosts: sparks, gather_facts: false, tasks: [{ansible.builtin.ping: }]}\n"
BARS = {1: 6.0, 16: 20.0}  # times the ping play on one host, measured in the same run
EXECUTIONS = 12


def seconds(lab: Lab, playbook: str, repeat: int) -> float:
    """Median wall time of a playbook."""
    return statistics.median(harness.timed(lab, playbook) for _ in range(repeat))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", default="1,4,16", help="numbers of hosts to measure [1,4,16]")
    counts = [int(word) for word in parser.parse_args().hosts.split(",")]
    rows: list[dict[str, float | int | str]] = []
    one_ping = 0.0
    with tempfile.NamedTemporaryFile("w", suffix=".yml") as ping:
        ping.write(PING)
        ping.flush()
        for count in counts:
            lab = Lab(NAME)
            lab.up(count, replace=True)
            try:
                provisioned = seconds(lab, "site.yml", 1)
                one_ping = one_ping or seconds(lab, ping.name, 3)
                since = time.time()
                nothing = seconds(lab, "site.yml", 1)
                executions = max(len(host.module_executions(since)) for host in lab.hosts)
                nothing = sorted([nothing, seconds(lab, "site.yml", 1), seconds(lab, "site.yml", 1)])[1]
            finally:
                lab.down()
            bar = BARS.get(count)
            rows.append(
                {
                    "hosts": count,
                    "first_run_seconds": round(provisioned, 1),
                    "nothing_to_do_seconds": round(nothing, 1),
                    "ping_seconds": round(one_ping, 2),
                    "times_ping": round(nothing / one_ping, 1),
                    "bar": bar or "",
                    "met": "" if bar is None else "yes" if nothing / one_ping <= bar else "NO",
                    "module_executions": executions,
                    "executions_met": "yes" if executions <= EXECUTIONS else "NO",
                }
            )
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    print(json.dumps({"bench": "site", "rows": rows}))
    return 1 if "NO" in {row[key] for row in rows for key in ("met", "executions_met")} else 0


if __name__ == "__main__":
    sys.exit(main())
