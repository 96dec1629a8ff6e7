# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""``python3 -m lab.engine make-repo DIR | serve DIR --address A --port P | releases | pin FILE``."""

from __future__ import annotations

import argparse
import json
import sys

from . import make_repo, releases, write_inventory
from .serve import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="lab.engine", description="The stand-in engine's git repository.")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make-repo", help="create the bare repository and print its releases as JSON")
    make.add_argument("directory")
    server = commands.add_parser("serve", help="serve a bare repository over HTTP until interrupted")
    server.add_argument("directory")
    server.add_argument("--address", default="127.0.0.1")
    server.add_argument("--port", type=int, default=8081)
    commands.add_parser("releases", help="print tags, commits and weights as JSON")
    pin = commands.add_parser("pin", help="write the tags and their commits into a group_vars file")
    pin.add_argument("file", nargs="?", default="inventory/lab/group_vars/all/releases.yml")
    options = parser.parse_args()
    if options.command == "make-repo":
        print(json.dumps(make_repo(options.directory), indent=2))
    elif options.command == "serve":
        serve(options.directory, options.address, options.port)
    elif options.command == "releases":
        print(json.dumps(releases(), indent=2))
    else:
        print(f"{options.file}: {'written' if write_inventory(options.file) else 'up to date'}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
