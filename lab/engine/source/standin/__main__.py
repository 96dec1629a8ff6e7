"""Start of all six programs: which one is decided by the name of the executable."""

from __future__ import annotations

import os
import sys


def main() -> int:
    name = os.path.basename(sys.argv[0])
    if name == "ds4-server":
        import server

        return server.main(sys.argv[1:])
    import tools

    return tools.main(name, sys.argv[1:])


sys.exit(main())
