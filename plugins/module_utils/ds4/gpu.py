# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""GPUs of a host as nvidia-smi tells them, or why it tells nothing. GPU memory is never asked: GB10 answers [N/A]."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from .command import Ran, run
from .files import read_text

FIELDS = ("name", "compute_cap", "driver_version", "vbios_version", "uuid")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader")
KERNEL_MODULE = "/proc/driver/nvidia/version"

# What nvidia-smi says when it fails → our word for it. Order matters: a mismatch is also an NVML failure.
_FAILURES = (
    ("mismatch", re.compile(r"driver/library version mismatch", re.I)),
    (
        "no_driver",
        re.compile(
            r"couldn't communicate with the nvidia driver|driver not loaded|command not found"
            r"|couldn't find libnvidia-ml|nvml shared library not found",
            re.I,
        ),
    ),
    ("no_device", re.compile(r"no devices were found|gpu is lost|unable to determine the device handle", re.I)),
)
_NOTHING = re.compile(
    r"^\[?(n/a|not supported|not available|unknown error|unknown|err!|gpu requires reset|insufficient permissions)?\]?$",
    re.I,
)
_CUDA = re.compile(r"CUDA(?:\s+\w+)?\s+Version\s*:\s*(\d+\.\d+)")
_CAPABILITY = re.compile(r"^\d+\.\d+$")
_MODULE_VERSION = re.compile(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s")

Runner = Callable[..., Ran]


def known(value: str) -> str:
    """The value, or ``""`` where nvidia-smi wrote one of its words for "no answer" (``[N/A]``, ``Not Supported``…)."""
    value = value.strip()
    return "" if _NOTHING.match(value) else value


def parse_query(text: str) -> list[dict[str, str]] | None:
    """Rows of the query; None when any line has another shape, so that garbage is never half believed.

    A field without an answer is ``""``; so is a compute capability that is not ``major.minor``.
    """
    rows = []
    for line in filter(str.strip, text.splitlines()):
        values = line.rsplit(",", len(FIELDS) - 1)  # from the right: only a name could hold a comma
        if len(values) != len(FIELDS):
            return None
        row = {field: known(value) for field, value in zip(FIELDS, values)}
        if not row["name"]:
            return None
        if not _CAPABILITY.match(row["compute_cap"]):
            row["compute_cap"] = ""
        rows.append(
            {
                "name": row["name"],
                "compute_cap": row["compute_cap"],
                "driver": row["driver_version"],
                "vbios": row["vbios_version"],
                "uuid": row["uuid"],
            }
        )
    return rows or None


def parse_cuda_supported(text: str) -> str:
    """CUDA version the driver supports, from nvidia-smi's header or its ``--version``: ``13.0``, ``""`` when absent."""
    match = _CUDA.search(text)
    return match.group(1) if match else ""


def parse_kernel_module(text: str) -> str:
    """Version of the loaded kernel module from ``/proc/driver/nvidia/version``: ``580.95.05``, ``""`` when absent."""
    match = _MODULE_VERSION.search(text)
    return match.group(1) if match else ""


def diagnose(answer: Ran) -> str:
    """One word for a query that failed: mismatch, no_driver, no_device, timeout, else unparsable."""
    if answer.timed_out:
        return "timeout"
    text = answer.out + answer.err
    if answer.rc == 127:
        return "no_driver"
    return next((word for word, pattern in _FAILURES if pattern.search(text)), "unparsable")


def probe(
    *, timeout_seconds: float = 20.0, runner: Runner = run, kernel_module_path: str = KERNEL_MODULE
) -> dict[str, Any]:
    """Ask nvidia-smi.

    Args:
        timeout_seconds: limit for each of at most three calls; none follows one that ran past it.
        runner: stand-in for ``command.run`` in tests.
        kernel_module_path: file with the version of the loaded kernel module.

    Returns:
        ``{gpus: [{name, compute_cap, driver, vbios, uuid}], driver, kernel_module, cuda_supported, diagnosis, text}``;
        ``diagnosis`` is ok, no_driver, mismatch, no_device, timeout or unparsable; ``text`` is what the tool said when
        it is not ok. Unknown values are ``""``.
    """
    result: dict[str, Any] = {
        "gpus": [],
        "driver": "",
        "kernel_module": parse_kernel_module(read_text(kernel_module_path)),
        "cuda_supported": "",
        "diagnosis": "ok",
        "text": "",
    }
    answer = runner(QUERY, timeout_seconds=timeout_seconds)
    rows = parse_query(answer.out) if answer.rc == 0 else None
    if rows is None:
        result["diagnosis"] = diagnose(answer)
        result["text"] = _shortened(answer.out + "\n" + answer.err) or "nvidia-smi said nothing"
        result["driver"] = result["kernel_module"]
        return result
    result["gpus"] = rows
    result["driver"] = next((row["driver"] for row in rows if row["driver"]), result["kernel_module"])
    result["cuda_supported"] = _cuda_supported(runner, timeout_seconds)
    return result


def _cuda_supported(runner: Runner, timeout_seconds: float) -> str:
    calls: Sequence[Sequence[str]] = (("nvidia-smi", "--version"), ("nvidia-smi",))  # older drivers know only the table
    for argv in calls:
        answer = runner(argv, timeout_seconds=timeout_seconds)
        if answer.timed_out:
            break
        version = parse_cuda_supported(answer.out)
        if version:
            return version
    return ""


def _shortened(text: str, limit: int = 400) -> str:
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= limit else text[:limit] + "…"


def main(argv: Sequence[str] | None = None) -> int:
    """``python3 -m ds4.gpu [--json] [--timeout SECONDS]``: 0 when the driver answers, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python3 -m ds4.gpu", description="What nvidia-smi says about the GPUs here.")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--timeout", type=float, default=20.0, metavar="SECONDS", help="limit per call (default 20)")
    options = parser.parse_args(argv)
    result = probe(timeout_seconds=options.timeout)
    if options.json:
        json.dump(result, sys.stdout, indent=2)
        print()
    else:
        for gpu in result["gpus"]:
            print(
                f"{gpu['name']}  compute_cap {gpu['compute_cap'] or 'unknown'}  driver {gpu['driver']}  VBIOS {gpu['vbios']}"
            )
        print(
            f"diagnosis: {result['diagnosis']}  CUDA of the driver: {result['cuda_supported'] or 'unknown'}  {result['text']}".rstrip()
        )
    return 0 if result["diagnosis"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main())
