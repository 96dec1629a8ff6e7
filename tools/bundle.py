#!/usr/bin/env python3
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Pack what a host without Internet needs: the engine's source at its pinned commit, the weights or their plan, packages.

Usage: tools/bundle.py DIRECTORY [--weights] [--packages] [--path PATH_ON_HOST] [--vars FILE]

The directory can then be carried to the hosts (USB disk, NFS, rsync) and is used with the variables it contains::

    ansible-playbook site.yml -e @DIRECTORY/bundle.yml
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "plugins/module_utils"))

from ds4 import fetch, fetch_state, fetch_unit, wanted  # noqa: E402  (needs the path above)
from ds4.errors import Ds4Error  # noqa: E402
from ds4.files import human_bytes, is_ours, mark  # noqa: E402
from ds4.pin import generation_files, resolve_pin  # noqa: E402

REPOSITORY = "https://github.com/Entrpi/ds4.git"


def variables(path: str) -> dict[str, Any]:
    """The pin of this repository, with the operator's variables on top."""
    found: dict[str, Any] = yaml.safe_load((ROOT / "group_vars/all/release.yml").read_text(encoding="utf-8"))
    if path:
        found.update(yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {})
    return found


def git(*arguments: str) -> str:
    """Standard output of git.

    Raises:
        Ds4Error: its last words.
    """
    ran = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Ds4Error(
            f"git {arguments[0]} failed",
            found=ran.stderr.strip()[-400:],
            cure="check the network, or cuda_build_repository",
        )
    return ran.stdout


def pack_engine(folder: Path, repository: str, release: str, commit: str) -> Path:
    """One file with the tag and its history, which git reads like a repository.

    Raises:
        Ds4Error: the tag does not name the pinned commit.
    """
    clone = folder / ".engine.git"
    shutil.rmtree(clone, ignore_errors=True)
    try:
        git("clone", "--quiet", "--bare", "--single-branch", "--branch", release, "--", repository, str(clone))
        found = git("-C", str(clone), "rev-parse", f"refs/tags/{release}^{{commit}}").strip()
        if commit and found != commit:
            raise Ds4Error(
                f"Tag {release} does not name the pinned commit; nothing was packed",
                found=found,
                required=commit,
                cure="compare the two commits; then `make bump` or ds4_releases_extra",
            )
        path = folder / "engine.bundle"
        git("-C", str(clone), "bundle", "create", str(path.resolve()), f"refs/tags/{release}")
    finally:
        shutil.rmtree(clone, ignore_errors=True)
    return path


# Settings of a fetch that hold on this machine too, as they are called in the variables and in a plan.
SETTINGS = {
    "weights_allowed_hosts": "allowed_hosts",
    "weights_token_hosts": "token_hosts",
    "weights_token_file": "token_file",
    "weights_proxy_url": "proxy_url",
    "weights_proxy_credentials_file": "proxy_credentials_file",
    "weights_no_proxy": "no_proxy",
    "weights_ca_file": "ca_file",
    "weights_connections": "connections",
    "weights_stall_seconds": "stall_seconds",
    "weights_stall_bytes_per_second": "stall_bytes_per_second",
    "weights_retries": "retries",
    "weights_backoff_seconds": "backoff_seconds",
    "weights_backoff_limit_seconds": "backoff_limit_seconds",
    "weights_deadline_seconds": "deadline_seconds",
}


def fetch_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """How to reach the sources, from the operator's variables; what is general counts where nothing else is said."""
    general = {"weights_proxy_url": "ds4_proxy_url", "weights_ca_file": "ds4_ca_file"}
    known = {**{name: values[other] for name, other in general.items() if values.get(other)}, **values}
    found = {setting: known[name] for name, setting in SETTINGS.items() if name in known}
    rate = float(known.get("weights_bandwidth_mib_per_second", 0))
    return {**found, "bandwidth_bytes_per_second": rate * 1024**2}


def pack_weights(
    folder: Path,
    generation: str,
    files: Sequence[dict[str, Any]],
    sources: Sequence[str],
    settings: Mapping[str, Any],
    *,
    bring: bool,
) -> int:
    """The plan of the weights and a list for sha256sum; with ``bring`` the files themselves. Returns the exit code."""
    folder.mkdir(exist_ok=True)
    if not is_ours(str(folder)):
        mark(str(folder), "weights of a bundle")
    layout = fetch_unit.Layout(str(folder.resolve()), str(folder.resolve()), "", "")
    plan = wanted.build_plan(
        generation=generation, files=files, sources=sources, layout=layout, user="root", **settings
    )
    (folder / ".fetch").mkdir(exist_ok=True)
    plan.write(layout.plan)
    known = [f"{item.sha256}  {item.target}\n" for item in plan.files if item.sha256]
    (folder / "SHA256SUMS").write_text("".join(known), encoding="ascii")
    urls = [f"{url}\n" for item in plan.files for url in item.sources]
    (folder / "addresses.txt").write_text("".join(urls), encoding="utf-8")
    return fetch.run(plan, fetch_state.Secrets.of(plan)) if bring else 0


def pack_packages(folder: Path, names: Sequence[str]) -> None:
    """Debian packages and what they need beside what is installed here: useful on a machine of the hosts' own kind.

    Raises:
        Ds4Error: apt cannot bring them.
    """
    partial = folder / "partial"
    partial.mkdir(parents=True, exist_ok=True)
    options = {
        "Dir::Cache::archives": str(folder.resolve()),
        "APT::Sandbox::User": "root",  # the folder is nobody else's
        "Debug::NoLocking": "1",  # nothing is installed
    }
    argv = ["apt-get", "install", "--download-only", "--reinstall", "--assume-yes", "--quiet"]
    argv += [f"--option={name}={value}" for name, value in options.items()]
    ran = subprocess.run([*argv, *names], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Ds4Error(
            "apt-get could not download the packages",
            found=ran.stderr.strip()[-400:],
            cure="run it on a machine like the hosts, or leave --packages away",
        )
    partial.rmdir()


def describe(
    release: str,
    generation: str,
    path: str,
    files: Sequence[dict[str, Any]],
    brought: bool,
    packages: Sequence[str],
    packed: bool,
) -> str:
    """What is in the bundle, for whoever finds it on a disk."""
    size = human_bytes(sum(int(entry.get("bytes") or 0) for entry in files))
    weights = (
        "here, verified"
        if brought
        else "not here: put the files of weights/addresses.txt there, then `sha256sum -c SHA256SUMS`"
    )
    install = f"\n                Where one is missing: sudo apt-get install {path}/packages/*.deb" if packed else ""
    return f"""Everything a DGX Spark without Internet needs for ds4 {release} (weights {generation}, {size}).

engine.bundle   the engine's source at its commit; git reads it like a repository
weights/        plan, addresses and hashes; the files are {weights}
packages.txt    Debian packages that the hosts must have: {" ".join(packages)}{install}
bundle.yml      variables that make site.yml use all this

Carry this directory to every host, to {path}, readable for everybody. Then, on the controller:

    ansible-playbook site.yml -e @bundle.yml
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--weights", action="store_true", help="fetch the weights into the bundle too (about 90 GiB)")
    parser.add_argument(
        "--packages", action="store_true", help="download the Debian packages (run it on a machine like the hosts)"
    )
    parser.add_argument(
        "--path", default="/srv/ds4-bundle", help="where the directory will be on the hosts [%(default)s]"
    )
    parser.add_argument(
        "--vars", default="", metavar="FILE", help="YAML file with your own ds4_ and weights_ variables"
    )
    options = parser.parse_args(arguments)
    folder: Path = options.directory
    try:
        values = variables(options.vars)
        release = str(values["ds4_release"])
        generations = {**values["ds4_weights"], **values.get("ds4_weights_extra", {})}
        releases = {**values["ds4_releases"], **values.get("ds4_releases_extra", {})}
        pin = resolve_pin(release, releases, str(values.get("ds4_commit", "")), generations)
        if pin["errors"]:
            raise Ds4Error("The pin cannot be used", found=" ".join(pin["errors"]))
        generation = str(values.get("weights_generation", pin["generation"]))
        leave_out = [] if values.get("weights_drafter", True) else ["drafter"]
        files = [file for file in generation_files(generations, generation) if file["role"] not in leave_out]
        packages = yaml.safe_load((ROOT / "group_vars/all/wiring.yml").read_text(encoding="utf-8"))[
            "host_verify_packages"
        ]
        folder.mkdir(parents=True, exist_ok=True)
        pack_engine(folder, str(values.get("cuda_build_repository", REPOSITORY)), release, pin["commit"])
        sources = values.get("weights_sources", ["https://huggingface.co"])
        settings = fetch_settings(values)
        code = pack_weights(folder / "weights", generation, files, sources, settings, bring=options.weights)
        if code:
            return code
        if options.packages:
            pack_packages(folder / "packages", packages)
        (folder / "packages.txt").write_text("\n".join(packages) + "\n", encoding="ascii")
        use: dict[str, Any] = {
            "ds4_release": release,
            "cuda_build_repository": f"{options.path}/engine.bundle",
            "weights_generation": generation,
            "weights_sources": [f"{options.path}/weights"],
        }
        if leave_out:
            use["weights_drafter"] = False
        (folder / "bundle.yml").write_text(yaml.safe_dump(use, sort_keys=True), encoding="utf-8")
        text = describe(release, generation, options.path, files, options.weights, packages, options.packages)
        (folder / "README.txt").write_text(text, encoding="utf-8")
    except (Ds4Error, OSError) as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 1
    print(text + json.dumps({"directory": str(folder), "commit": pin["commit"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
