"""Make the mechanism importable as ``ds4`` and as ``ansible.module_utils.ds4``, as on a host and inside a module."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

for folder in ("plugins/module_utils", "plugins/modules", "plugins/filter", "plugins/action", "plugins/callback", "."):
    sys.path.insert(0, str(ROOT / folder))

import ansible.module_utils  # noqa: E402  (needs nothing of ours, but belongs after the path set-up)

ansible.module_utils.__path__.append(str(ROOT / "plugins/module_utils"))
