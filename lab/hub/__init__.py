# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The stand-in hub: serves small weights like Hugging Face does, and misbehaves on request.

``Hub`` starts one as a child process and stops it; ``Control`` steers one that runs already.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Control:
    """Steers a running hub through its control port.

    Attributes:
        url: what HF_ENDPOINT must be.
        cdn_url: where the signed links point to.
        proxy_url: the forward proxy.
        control_url: the control port.
        ca_file: PEM file of the authority to trust; empty without TLS.
        pid: of the hub's process.
    """

    def __init__(self, control_url: str) -> None:
        self.control_url = control_url
        info = self._ask("info")
        self.url: str = info["url"]
        self.cdn_url: str = info["cdn_url"]
        self.proxy_url: str = info["proxy_url"]
        self.ca_file: str = info["ca_file"]
        self.pid: int = info["pid"]

    def _ask(self, what: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.control_url}/_lab/{what}", data)
        try:
            with _DIRECT.open(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error)["error"]) from error

    def faults(self, *rules: dict[str, Any], keep: bool = False) -> None:
        """Replace the rules (``lab.hub.faults`` says what a rule is), or with ``keep`` add to them.

        Raises:
            ValueError: a rule is wrong; the message names what is known.
        """
        self._ask("faults", {"faults": list(rules), "keep": keep})

    def rules(self) -> list[dict[str, Any]]:
        """The rules with the numbers of requests ``seen`` and times ``fired``."""
        return list(self._ask("faults"))

    def options(self, **values: Any) -> dict[str, Any]:
        """Change options (fields of ``lab.hub.server.Options``) and return all of them."""
        return dict(self._ask("options", values))

    def stats(self) -> dict[str, Any]:
        """Sums and the log of requests (``lab.hub.server.State.stats``)."""
        return dict(self._ask("stats"))

    def reset(self) -> None:
        """Back to how the hub was started: no faults, first options, empty log."""
        self._ask("reset", {})


class Hub(Control):
    """A hub of one's own, for a ``with`` block.

    Args:
        root: folder with ``OWNER/NAME/REVISION/FILE`` (``lab.hub.weights.write`` makes one).
        address: where it listens, as clients write it.
        tls: serve HTTPS with an authority of its own.
        cdn_address: where the CDN listens; by default another loopback address than 127.0.0.1, else ``address``.
        options: fields of ``lab.hub.server.Options`` from the start.
    """

    def __init__(
        self,
        root: str | Path,
        address: str = "127.0.0.1",
        *,
        tls: bool = False,
        cdn_address: str = "",
        options: dict[str, Any] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ds4-lab-hub-")
        argv = [sys.executable, "-m", "lab.hub", "serve", "--root", str(root), "--until-stdin-ends"]
        argv += ["--address", address, "--cdn-address", cdn_address]
        if tls:
            argv += ["--tls-directory", self._folder.name]
        self._process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"the hub did not start; its message is above; exit code {self._process.returncode}")
        super().__init__(json.loads(line)["control_url"])
        self._options = options or {}
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.options(**self._options)

    def close(self) -> None:
        """Stop the process and remove its certificates."""
        self._process.terminate()
        self._process.communicate()
        self._folder.cleanup()

    def __enter__(self) -> Hub:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
