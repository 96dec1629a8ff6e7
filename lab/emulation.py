"""Hosts of another processor architecture: their programs run under qemu's user emulation.

Slow (ten times and more) and not part of `make test`. What it shows: that nothing of the product assumes x86.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from . import system

BINFMT = "/proc/sys/fs/binfmt_misc"
PROGRAMS = {
    "qemu-aarch64-static": "qemu-user-static",
    "update-binfmts": "binfmt-support",
    "arch-test": "arch-test",
    "gcc": "gcc",
}


class Architecture(NamedTuple):
    """What an architecture is called: by Debian, by the kernel (`uname -m`), by Python wheels."""

    debian: str
    machine: str
    wheels: tuple[str, ...]


KNOWN = {
    "arm64": Architecture(
        "arm64", "aarch64", ("manylinux2014_aarch64", "manylinux_2_17_aarch64", "manylinux_2_28_aarch64")
    )
}


def named(architecture: str) -> Architecture:
    """An architecture by Debian's name."""
    try:
        return KNOWN[architecture]
    except KeyError:
        raise system.LabError(f"architecture: unknown {architecture!r}. Known: {', '.join(KNOWN)}, or empty.") from None


def require(architecture: str) -> None:
    """Let this machine run programs of ``architecture``; changes nothing but the kernel's table of interpreters."""
    if not architecture:
        return
    named(architecture)
    missing = sorted(
        {package for program, package in PROGRAMS.items() if system.run(["which", program], check=False).rc}
    )
    if missing:
        raise system.LabError(
            f"Hosts of architecture {architecture} need the Debian packages {', '.join(missing)}. "
            f"Cure: apt-get install -y {' '.join(missing)}"
        )
    if not os.path.exists(os.path.join(BINFMT, "register")):
        system.run(["mount", "-t", "binfmt_misc", "binfmt_misc", BINFMT])
    entry = f"qemu-{named(architecture).machine}"
    system.run(["update-binfmts", "--enable", entry])
    # A second entry, asked first, with the flag C: without it sudo is not root under emulation.
    if not os.path.exists(os.path.join(BINFMT, f"lab-{entry}")):
        given = dict(
            line.split(" ", 1) for line in system.read(os.path.join(BINFMT, entry)).splitlines() if " " in line
        )
        magic, mask = (_escaped(given[name]) for name in ("magic", "mask"))
        system.write(os.path.join(BINFMT, "register"), f":lab-{entry}:M::{magic}:{mask}:{given['interpreter']}:OCPF")
    if system.run(["arch-test", architecture], check=False).rc != 0:
        raise system.LabError(
            f"Programs of architecture {architecture} do not run here. Cure: see `update-binfmts --display` and `arch-test {architecture}`."
        )


def _escaped(hexadecimal: str) -> str:
    """Hexadecimal digits as the kernel's table wants them: backslash, x and two digits for each byte."""
    return "".join(f"\\x{hexadecimal[i : i + 2]}" for i in range(0, len(hexadecimal), 2))


def files() -> dict[str, str]:
    """Files of a host that make it boot under emulation: credentials of units need a system call that qemu lacks."""
    units = (
        "systemd-sysctl",
        "systemd-sysusers",
        "systemd-tmpfiles-setup",
        "systemd-tmpfiles-setup-dev",
        "systemd-tmpfiles-clean",
    )
    return {
        f"etc/systemd/system/{unit}.service.d/10-emulation.conf": "[Service]\nLoadCredential=\nSetCredential=\n"
        for unit in units
    }


def native_programs(upper: str) -> None:
    """Put programs of this machine into a host where emulated ones cannot do their work."""
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nsenter.c")
    target = os.path.join(upper, "usr/bin/nsenter")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    system.run(["gcc", "-static", "-O2", "-Wall", "-o", target, source])


def give_address(leader: int, address: str) -> None:
    """Set a host's address from outside: its own network manager does not work under emulation."""
    enter = ["nsenter", "--target", str(leader), "--net", "ip"]
    system.run([*enter, "address", "replace", f"{address}/24", "dev", "host0"], check=False)
    system.run([*enter, "link", "set", "host0", "up"], check=False)
