# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Write docs/verify.md from the findings of host_verify; `--check` fails when the page is not what they say."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
DEFAULTS = ROOT / "roles/host_verify/defaults/main.yml"
SOURCE = ROOT / "roles/host_verify/vars/main/findings.yml"
PAGE = ROOT / "docs/verify.md"

PHASES = {
    "stage": (
        "Findings that stop a host at once",
        "Nothing is touched on a host while one of these holds. Other hosts go on.",
    ),
    "switch": (
        "Findings that stop the switch",
        "Build, download and preparation go on beside what serves now; the engine is not switched while one of these holds.",
    ),
    "note": ("Notes", "Told, shown in the table, and never stop anything."),
}

HEAD = """\
<!-- Written by tools/gen_verify_docs.py from roles/host_verify/vars/main/findings.yml. Change that file, then `make docs`. -->
# What is verified, and what each finding means

Before anything is touched, one look reads every host, all in parallel, and everything is judged at once: one message per host
lists every problem with what was found, what is required and what cures it. Run only this part with

```
ansible-playbook site.yml --tags verify
```

It changes nothing, with or without `--check`. A value that cannot be determined never passes.

**Overriding.** A finding that names an override can be switched off by that name:
`host_verify_allow: [architecture, compute_cap]` in the inventory, or `-e host_verify_allow=architecture,compute_cap` for one run.
What was overridden is shown again in the message and in the table at the end, so that nobody forgets it. Limits are variables of
their own ([variables](variables.md), those that begin with `host_verify_`); changing a limit is better than switching a check off.

**Memory.** What counts is MemAvailable: the page cache, full after a download, is given back, so MemFree says nothing. On a Spark the
GPU shares this memory, and no tool has a figure for the GPU's part. An engine that will be replaced (ours, or one of the public installer
that is taken over) is counted as what it will give back: the unavailable memory that is booked under no name in `/proc/meminfo`, less
what driver and firmware keep (`host_verify_memory_residue_gib`). When another program holds CUDA memory too, that remainder cannot be
divided; then only the size of the weights counts. The same gate is asked again on the host right before every start.

**Disks.** Needs are added up per file system, with credit for what is there already, each path on the file system it really lies on.

**What is recorded** in any case: kernel, DGX release, driver, BIOS, VBIOS and product, under `host_verify` in the JSON file that
`DS4_SUMMARY_FILE=PATH` names. Hosts of one fleet that differ get a note;
minimum and known bad versions are yours to set in `host_verify_versions`.

| finding | phase | override |
| --- | --- | --- |
"""


TAIL = """\
## What no check can see

A Spark can pass everything here, answer every question and still be far too slow: some units were reported to stay at about 30 W, or at
500 to 850 MHz instead of about 2400, whatever the load, when the power supply was not negotiated. Before a question is asked the GPU idles
at as little, so a reading then says nothing; look while a long answer is being written:

```
nvidia-smi --query-gpu=power.draw,clocks.sm,utilization.gpu --format=csv --loop=1
```

Take the power supply off the wall and off the Spark for a minute, then look again; when it stays, it is a case for the warranty. Old
firmware was reported to halve the speed too: compare `versions` of your hosts (the note [drift](#drift)).
"""


def page(findings: Mapping[str, Mapping[str, Any]], defaults: Mapping[str, Any]) -> str:
    """Text of docs/verify.md, with the role's defaults as the limits."""
    rows = [
        f"| [{name}](#{name}) | {entry['phase']} | {_override(entry)} |"
        for phase in PHASES
        for name, entry in findings.items()
        if entry["phase"] == phase
    ]
    parts = [HEAD + "\n".join(rows)]
    for phase, (title, text) in PHASES.items():
        parts.append(f"## {title}\n\n{text}")
        parts += [_entry(name, entry, defaults) for name, entry in findings.items() if entry["phase"] == phase]
    return "\n\n".join([*parts, TAIL])


def _override(entry: Mapping[str, Any]) -> str:
    return f"`{entry['allow']}`" if entry["allow"] else "—"


def _entry(name: str, entry: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    lines = [f"### {name}", "", f"**{_shown(entry['what'])}.** {_shown(entry['why'])}", ""]
    if "limit" in entry:
        value = defaults[entry["limit"]]
        given = "empty" if value in ("", [], {}) else f"`{value}`"
        lines.append(f"- Limit: `{entry['limit']}`, {given} as delivered")
    if str(entry["required"]) != "{required}":
        lines.append(f"- Required: {_shown(entry['required'])}")
    if "cures" in entry:
        lines.append(f"- Cure: {_shown(str(entry['cure']).replace('{cures}', 'whichever fits'))}:")
        lines += [f"  - {_shown(sentence)}" for sentence in entry["cures"].values()]
    else:
        lines.append(f"- Cure: {_shown(entry['cure'])}")
    if "unknown" in entry:
        lines.append(f"- When it cannot be determined: {_shown(entry['unknown'])}")
    if entry["phase"] != "note":
        still = f" (then it still stops the {entry['allowed_phase']})" if "allowed_phase" in entry else ""
        lines.append(
            f"- Override: `host_verify_allow: [{entry['allow']}]`{still}" if entry["allow"] else "- Override: none"
        )
    return "\n".join(lines)


def _shown(text: str) -> str:
    """Placeholders as a reader expects them: ``{found}`` → ``<found>`` in code, words that are filled in elsewhere."""
    inside = False
    parts = []
    for piece in " ".join(str(text).split()).split("`"):
        parts.append(piece.replace("{", "<").replace("}", ">") if inside else piece.replace("{", "*").replace("}", "*"))
        inside = not inside
    return "`".join(parts)


def main(argv: list[str] | None = None) -> int:
    """Write or check the page; 1 when the check finds a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the page is out of date")
    options = parser.parse_args(argv)
    findings = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))["__host_verify_findings"]
    text = page(findings, yaml.safe_load(DEFAULTS.read_text(encoding="utf-8")))
    current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if options.check:
        if text != current:
            print(
                f"{PAGE.relative_to(ROOT)} is not what {SOURCE.relative_to(ROOT)} says. Cure: `make docs`, and commit."
            )
            return 1
        return 0
    if text != current:
        PAGE.write_text(text, encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
