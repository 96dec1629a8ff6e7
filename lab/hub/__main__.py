# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Command line of the stand-in hub: ``python3 -m lab.hub serve | weights | faults | options | stats | reset``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading

from . import Control, server, weights


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m lab.hub", description="A stand-in for Hugging Face.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve a folder; prints one JSON line with the addresses, then runs")
    serve.add_argument("--root", required=True, help="folder with OWNER/NAME/REVISION/FILE")
    serve.add_argument("--address", default="127.0.0.1", help="where hub and proxy listen [%(default)s]")
    serve.add_argument(
        "--cdn-address", default="", help="where the CDN listens [127.0.0.2 on loopback, else as --address]"
    )
    serve.add_argument("--tls-directory", default="", help="serve HTTPS; the authority and certificates are made here")
    serve.add_argument("--name", action="append", default=[], help="further host name for the certificate")
    for port in ("port", "cdn-port", "proxy-port", "control-port"):
        serve.add_argument(f"--{port}", type=int, default=0, help="0: any free port [%(default)s]")
    serve.add_argument("--options", default="{}", help="JSON: fields of lab.hub.server.Options")
    serve.add_argument("--until-stdin-ends", action="store_true", help="stop when standard input is closed")
    make = commands.add_parser("weights", help="write the lab's weights and print their manifest")
    make.add_argument("--root", required=True, help="folder to fill")
    for name, text in (
        ("faults", "set rules, or print them with what is spent"),
        ("options", "change options, or print them"),
        ("stats", "print sums and the log"),
        ("reset", "forget faults, options and the log"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--control", required=True, help="the control_url that serve printed")
        if name in {"faults", "options"}:
            command.add_argument("json", nargs="?", help="a JSON list of rules, or a JSON object of options")
    return parser


def _set_at_end_of_input(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


def _serve(arguments: argparse.Namespace) -> None:
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    state = server.serve(
        arguments.root,
        address=arguments.address,
        cdn_address=arguments.cdn_address,
        tls_directory=arguments.tls_directory,
        names=tuple(arguments.name),
        ports=(arguments.port, arguments.cdn_port, arguments.proxy_port, arguments.control_port),
        options=server.Options(**json.loads(arguments.options)),
    )
    print(json.dumps(state.info), flush=True)
    if arguments.until_stdin_ends:
        threading.Thread(target=_set_at_end_of_input, args=(stop,), daemon=True).start()
    stop.wait()


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.command == "serve":
        _serve(arguments)
        return
    if arguments.command == "weights":
        weights.write(arguments.root)
        print(json.dumps(weights.manifest(), indent=2))
        return
    control = Control(arguments.control)
    if arguments.command == "stats":
        print(json.dumps(control.stats(), indent=2))
    elif arguments.command == "reset":
        control.reset()
    elif arguments.command == "faults":
        if arguments.json:
            control.faults(*json.loads(arguments.json))
        print(json.dumps(control.rules(), indent=2))
    else:
        print(json.dumps(control.options(**json.loads(arguments.json or "{}")), indent=2))


if __name__ == "__main__":
    main()
