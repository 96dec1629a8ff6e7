"""What a module accepts and what its DOCUMENTATION says are the same, for every module."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args

MODULES = sorted((Path(__file__).resolve().parents[2] / "plugins/modules").glob("*.py"))
ASPECTS = ("type", "default", "choices", "elements", "required", "no_log", "aliases")


class _StopError(Exception):
    """Raised instead of building the module: its arguments are known."""


def load(path: Path) -> ModuleType:
    """The module, by its path: an action plugin may bear the same name."""
    spec = importlib.util.spec_from_file_location(f"module_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spec_of(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Keyword arguments that ``main()`` gives to AnsibleModule."""
    seen: dict[str, Any] = {}

    def catch(*_args: Any, **kwargs: Any) -> None:
        seen.update(kwargs)
        raise _StopError

    monkeypatch.setattr(module, "AnsibleModule", catch)
    with patch_module_args({}), pytest.raises(_StopError):
        module.main()
    return seen


def normal(options: dict[str, Any] | None) -> dict[str, Any]:
    """Options reduced to what both sides state; absent means Ansible's own default."""
    result = {}
    for name, option in (options or {}).items():
        row = {aspect: option.get(aspect) for aspect in ASPECTS}
        row["type"] = row["type"] or "str"
        row["required"] = bool(row["required"])
        row["no_log"] = bool(row["no_log"])
        row["options"] = normal(option.get("options"))
        result[name] = row
    return result


def undescribed(options: dict[str, Any] | None, path: str = "") -> list[str]:
    found = []
    for name, option in (options or {}).items():
        if not option.get("description"):
            found.append(f"{path}{name}")
        found += undescribed(
            option.get("options") or option.get("suboptions") or option.get("contains"), f"{path}{name}."
        )
    return found


def documented(options: dict[str, Any] | None) -> dict[str, Any]:
    """Documentation calls nested options ``suboptions``."""
    return {
        name: {**option, "options": documented(option.get("suboptions") or option.get("options"))}
        for name, option in (options or {}).items()
    }


def test_there_are_modules() -> None:
    assert {"spark_gpu_info", "spark_memory_info", "spark_host_info"} <= {path.stem for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_module(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load(path)
    documentation = yaml.safe_load(module.DOCUMENTATION)
    given = spec_of(module, monkeypatch)
    assert documentation["module"] == path.stem
    assert normal(documented(documentation.get("options"))) == normal(given["argument_spec"])
    assert given["supports_check_mode"] is True
    assert undescribed(documentation.get("options")) == []
    attributes = documentation["attributes"]
    assert {"check_mode", "diff_mode", "platform"} <= set(attributes)
    assert all(attribute["support"] in ("full", "partial", "none", "N/A") for attribute in attributes.values())
    assert documentation["short_description"]
    assert documentation["description"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_examples_are_tasks_of_the_module(path: Path) -> None:
    module = load(path)
    tasks = yaml.safe_load(module.EXAMPLES)
    options = set(yaml.safe_load(module.DOCUMENTATION).get("options") or {})
    mine = [task for task in tasks if path.stem in task]
    assert mine
    assert all(task.get("name") for task in tasks)
    assert [name for task in mine for name in task[path.stem] or {} if name not in options] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_results_are_described(path: Path) -> None:
    module = load(path)
    returned = yaml.safe_load(module.RETURN)
    assert returned
    assert undescribed(returned) == []
    assert [name for name, entry in returned.items() if not entry.get("type") or not entry.get("returned")] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_header(path: Path) -> None:
    assert (
        "# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)"
        in path.read_text()[:300]
    )
