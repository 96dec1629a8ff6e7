"""Command line of the lab; see ``python3 -m lab --help``."""

from __future__ import annotations

import argparse
import json
import os
import sys

from . import api, image, services, system


def main() -> int:
    """Parse the command line and obey. Expected failures are one line on standard error and status 1."""
    parser = argparse.ArgumentParser(
        prog="python3 -m lab", description="Simulated DGX Sparks on this machine (needs root)."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, *, named: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        if named:
            sub.add_argument("--name", default="demo", help="name of the instance [demo]")
        return sub

    up = command("up", "Boot simulated Sparks.")
    up.add_argument("count", type=int, metavar="N", help="number of hosts")
    up.add_argument("--replace", action="store_true", help="take down a running instance of this name first")
    up.add_argument("--options", default="{}", metavar="JSON", help="host options, see HostOptions in lab/hosts.py")
    down = command("down", "End an instance and remove everything of it.")
    down.add_argument("--all", action="store_true", help="all instances on this machine")
    command("status", "Show what runs.", named=False)
    shell = command("shell", "Open a root shell in a host (or run a command there).")
    shell.add_argument("host", metavar="HOST")
    shell.add_argument("argv", nargs="*", metavar="COMMAND")
    logs = command("logs", "Show the journal of a host, or of one unit of it.")
    logs.add_argument("host", metavar="HOST")
    logs.add_argument("unit", nargs="?", metavar="UNIT")
    reset = command("reset", "Put a host back to what it was before its first boot.")
    reset.add_argument("host", metavar="HOST")
    for name, text in (("gpu", "Set what nvidia-smi says in a host."), ("memory", "Set the memory of a host (kB).")):
        sub = command(name, text)
        sub.add_argument("host", metavar="HOST")
        sub.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="JSON values; none: the standard again")
    needs = command("needs", "Show the Debian packages that are missing here.", named=False)
    needs.add_argument("--install", action="store_true", help="install them with apt-get")
    images = command("image", "Make the cached images without booting anything.", named=False)
    images.add_argument("--prune", action="store_true", help="remove cached images that this checkout does not use")
    command("pin", "Write the stand-ins' commits and hashes into inventory/lab.", named=False)

    arguments = parser.parse_args()
    try:
        return obey(arguments)
    except system.LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1


def obey(arguments: argparse.Namespace) -> int:
    """Do what the parsed command line says; the exit status."""
    if arguments.command == "needs":
        return needs(arguments.install)
    if arguments.command == "status":
        return status()
    if arguments.command == "pin":
        for path, text in services.pins().items():
            system.write(path, text)
        return 0
    system.require()
    if arguments.command == "image":
        used = [*image.layers(), *image.toolkit(), *services.cached()]
        print("\n".join(used))
        if arguments.prune:
            print("\n".join(f"removed {path}" for path in image.prune(used)))
        return 0
    if arguments.command == "down" and arguments.all:
        for lab in api.instances():
            lab.down()
        return 0
    lab = api.Lab(arguments.name)
    if arguments.command == "up":
        lab.up(arguments.count, replace=arguments.replace, **json.loads(arguments.options))
        show(lab)
        return 0
    if arguments.command == "down":
        lab.down()
        return 0
    host = lab.host(arguments.host)
    if arguments.command == "shell":
        argv = host.enter_command(arguments.argv or ["env", f"TERM={os.environ.get('TERM', 'dumb')}", "bash", "-l"])
        os.execvp(argv[0], argv)
    if arguments.command == "logs":
        sys.stdout.write(host.journal(arguments.unit))
    elif arguments.command == "reset":
        host.reset()
    else:
        getattr(host, arguments.command)(**dict(setting(text) for text in arguments.settings))
    return 0


def setting(text: str) -> tuple[str, object]:
    """``KEY=VALUE`` with the value as JSON, or as plain text when it is none."""
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def needs(install: bool) -> int:
    """Print, or install, the missing packages; status 1 when some are missing still."""
    missing = system.needs()
    if missing and install:
        if os.geteuid() != 0:
            raise system.LabError("Installing packages needs root. Cure: sudo python3 -m lab needs --install")
        print(f"lab: installing {' '.join(missing)}", flush=True)
        for argv in (
            ["apt-get", "-q", "update"],
            ["apt-get", "install", "-y", "-q", "--no-install-recommends", *missing],
        ):
            system.run(argv, timeout=900, env={"DEBIAN_FRONTEND": "noninteractive"})
        missing = system.needs()
    if missing:
        print(f"missing: {' '.join(missing)}\ncure: apt-get install -y {' '.join(missing)}")
    return 1 if missing else 0


def show(lab: api.Lab) -> None:
    """Print an instance: its hosts, and how to use it."""
    print(f"{lab.name}: {lab.info.get('gateway', '?')}/24, inventory {lab.inventory}")
    for host in lab.hosts:
        print(f"  {host.name}  {host.address}  {'up' if host.leader else 'down'}  user {host.user}")


def status() -> int:
    """Print all instances."""
    if os.geteuid() != 0:
        raise system.LabError("Only root sees the hosts' state. Cure: sudo python3 -m lab status")
    found = api.instances()
    for lab in found:
        show(lab)
    if not found:
        print("nothing runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
