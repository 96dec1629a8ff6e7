# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A certificate authority of the lab's own, made by the ``openssl`` program."""

from __future__ import annotations

import ipaddress
import os
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

DAYS = "30"


class Certificates(NamedTuple):
    """Paths of PEM files: the authority that a client must trust, and the server's chain and key."""

    ca_file: str
    cert_file: str
    key_file: str


def _openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"openssl {arguments[0]} failed: {done.stderr.strip()}")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def make(directory: str, names: Sequence[str]) -> Certificates:
    """Make an authority and a server certificate for ``names`` (host names and addresses) in ``directory``.

    Raises:
        RuntimeError: ``openssl`` refused; its message is included.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)

    def path(name: str) -> str:
        return os.path.join(directory, name)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    _openssl(
        *["req", "-x509", *key, "-days", DAYS, "-subj", "/CN=ds4 lab authority"],
        *["-keyout", path("ca-key.pem"), "-out", path("ca.pem")],
        *["-addext", "keyUsage=critical,keyCertSign,cRLSign"],
    )
    alternatives = ",".join(f"{'IP' if _is_address(name) else 'DNS'}:{name}" for name in dict.fromkeys(names))
    _openssl(
        *["req", "-x509", *key, "-days", DAYS, "-subj", "/CN=ds4 lab hub"],
        *["-keyout", path("server-key.pem"), "-out", path("server.pem")],
        *["-CA", path("ca.pem"), "-CAkey", path("ca-key.pem")],
        *["-addext", f"subjectAltName={alternatives}", "-addext", "basicConstraints=critical,CA:FALSE"],
        *["-addext", "extendedKeyUsage=serverAuth"],
    )
    return Certificates(path("ca.pem"), path("server.pem"), path("server-key.pem"))
