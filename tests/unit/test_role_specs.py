"""What a role accepts and what its defaults hold are the same, for every role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

ROLES = sorted(path for path in (Path(__file__).resolve().parents[2] / "roles").iterdir() if (path / "tasks").is_dir())
TYPES = {"str", "int", "float", "bool", "list", "dict", "path", "raw"}
PYTHON: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "path": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "list": (list,),
    "dict": (dict,),
    "raw": (object,),
}


def load(path: Path) -> dict[str, Any]:
    return (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}


def options_of(role: Path) -> dict[str, dict[str, Any]]:
    """Options of all entry points together."""
    specs = load(role / "meta/argument_specs.yml")["argument_specs"]
    return {name: option for entry in specs.values() for name, option in (entry.get("options") or {}).items()}


def variables_of(role: Path) -> dict[str, Any]:
    files = [role / "vars/main.yml", *sorted((role / "vars/main").glob("*.yml"))]
    return {name: value for path in files for name, value in load(path).items()}


def walk(options: dict[str, Any] | None, path: str = "") -> list[tuple[str, dict[str, Any]]]:
    rows = []
    for name, option in (options or {}).items():
        rows.append((f"{path}{name}", option))
        rows += walk(option.get("options"), f"{path}{name}.")
    return rows


def test_there_are_roles() -> None:
    assert "host_verify" in {role.name for role in ROLES}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_keys(role: Path) -> None:
    options = options_of(role)
    required = {name for name, option in options.items() if option.get("required")}
    assert set(load(role / "defaults/main.yml")) == set(options) - required


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_values(role: Path) -> None:
    """A default that the documentation states is the default there is, and is of the stated type."""
    wrong = []
    options = options_of(role)
    for name, value in load(role / "defaults/main.yml").items():
        option = options.get(name, {})
        templated = isinstance(value, str) and "{{" in value
        if "default" in option and option["default"] != value:
            wrong.append(f"{name}: the default is {value!r}, the specs say {option['default']!r}")
        kind = option.get("type", "str")
        proper = isinstance(value, PYTHON[kind]) and not (kind in ("int", "float") and isinstance(value, bool))
        if not templated and not proper:
            wrong.append(f"{name}: {value!r} is no {kind}")
        items = value if kind == "list" else [value]
        if "choices" in option and not templated and not set(items) <= set(option["choices"]):
            wrong.append(f"{name}: {value!r} is none of {option['choices']}")
    assert wrong == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_option_is_typed_and_described(role: Path) -> None:
    rows = walk(options_of(role))
    assert [name for name, option in rows if option.get("type") not in TYPES] == []
    assert [name for name, option in rows if not option.get("description")] == []
    assert [name for name, option in rows if option["type"] == "list" and not option.get("elements")] == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_names(role: Path) -> None:
    public = set(load(role / "defaults/main.yml")) | set(options_of(role))
    assert [name for name in public if not name.startswith(f"{role.name}_")] == []
    offered = f"{role.name}_arguments"  # what the role's module takes: the wiring gives it to ds4_look
    assert [name for name in variables_of(role) if not name.startswith(f"__{role.name}_") and name != offered] == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_default_has_a_comment(role: Path) -> None:
    """Beside the line or in the block above it."""
    path = role / "defaults/main.yml"
    lines = path.read_text().splitlines() if path.exists() else []
    bare = []
    described = False
    for line in lines:
        if not line.strip():
            described = False
        elif line.startswith("#"):
            described = True
        elif not line.startswith((" ", "-")) and not described and " #" not in line:
            bare.append(line)
    assert bare == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_no_role_reads_another_roles_variables(role: Path) -> None:
    """wiring.yml is the only place where one role's value meets another's."""
    foreign = {name: other.name for other in ROLES if other != role for name in options_of(other)}
    found = []
    for path in [
        *role.glob("tasks/*.yml"),
        *role.glob("defaults/*.yml"),
        *role.glob("vars/**/main.yml"),
        *role.glob("templates/*"),
    ]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.partition(" #")[0]
            if "{{" not in code and not code.strip().startswith(("when:", "that:", "- ")):
                continue
            found += [
                f"{path.relative_to(role)}:{number} {name}"
                for name in foreign
                if name in code.replace("'", " ").split()
            ]
    assert found == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_readme(role: Path) -> None:
    text = (role / "README.md").read_text()
    assert text.startswith(f"# {role.name}\n")


def test_weights_come_by_the_fetcher_alone() -> None:
    """A task that downloads would begin anew after every cut, and trust a file by its name."""
    allowed = {"ds4_weights", "ds4_report", "ansible.builtin.import_tasks", "ansible.builtin.include_tasks"}
    tasks = [
        task
        for path in (ROLES[0].parent / "weights/tasks").glob("*.yml")
        for task in yaml.safe_load(path.read_text()) or []
    ]
    words = {"name", "args", "become", "when", "register"}
    assert {word for task in tasks for word in task} - words <= allowed
