"""One simulated Spark on this machine: made, provisioned over SSH by site.yml, asked for the capital of France, left running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "demo"
QUESTION = {
    "model": "deepseek-v4-flash",
    "messages": [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}],
    "temperature": 0,
    "max_tokens": 64,
}


def main() -> int:
    if os.geteuid() != 0:
        print(
            "make demo makes a network bridge and boots a simulated host, which needs root. Cure: sudo make demo",
            file=sys.stderr,
        )
        return 1
    started = time.monotonic()
    python = ROOT / ".venv/bin/python3"
    subprocess.run([python, "-m", "lab", "needs", "--install"], cwd=ROOT, check=True)
    if subprocess.run([python, "-m", "lab", "up", "1", "--name", NAME], cwd=ROOT, check=False).returncode != 0:
        return 1
    sys.path.insert(0, str(ROOT))
    from lab.api import Lab

    lab = Lab(NAME)
    environment = {**os.environ, "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"}
    command = ["ansible-playbook", "-i", str(lab.inventory), "site.yml"]
    print(f"\n$ {' '.join(command)}", flush=True)
    if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0:
        print("\nThe playbook failed. Look around with: python3 -m lab shell spark1 --name demo", file=sys.stderr)
        return 1
    host = lab.hosts[0]
    ask = f"curl -sS --max-time 60 -H 'Content-Type: application/json' -d @- http://127.0.0.1:8000/v1/chat/completions <<'EOT'\n{json.dumps(QUESTION)}\nEOT"
    answer = json.loads(host.run(ask).out)["choices"][0]["message"]["content"].strip()
    state = host.run("systemctl show ds4 -p ActiveState,SubState,ExecMainStartTimestamp").out.replace("\n", "  ")
    print(
        f"""
What is the capital of France?
  {answer}

ds4.service on {host.name} ({host.address}): {state}
{time.monotonic() - started:.0f} s in all. The simulated Spark keeps running. Look around:

  .venv/bin/python3 -m lab shell {host.name} --name {NAME}        a root shell on it (systemctl status ds4, journalctl -u ds4)
  .venv/bin/ansible-playbook -i {lab.inventory} site.yml           again: nothing changes
  .venv/bin/ansible-playbook -i {lab.inventory} status.yml         wanted against running
  make demo-down                                              take it down, without leftovers
""".rstrip()
    )
    return 0 if "paris" in answer.lower() else 1


if __name__ == "__main__":
    sys.exit(main())
