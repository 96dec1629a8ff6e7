#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Door into ds4.build."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ds4_build
short_description: An immutable build of a pinned commit of the engine
description:
  - Clones the commit into a directory of its own, compiles it with the named toolkit, checks the programs and publishes
    them by rename. The engine that serves now is not touched.
  - A tag that does not name the pinned commit stops the work, with both ids.
  - Checked are that every expected program is there, an executable and newer than the checkout, that C(ds4-server --version)
    is the release, that the GPU code is exactly O(expected_sass), and that no library is missing.
  - Nothing is done when an intact build is there. Binaries are looked at by size, time, inode, owner and mode, and hashed
    when these differ from the record. A damaged build is left alone and another one made beside it.
  - The compiler runs in a transient systemd unit. A run that lost its connection loses nothing, the next one attaches.
options:
  repository:
    description: Address of the engine's git repository. It may not contain a password.
    type: str
    default: https://github.com/Entrpi/ds4.git
  release:
    description: Tag to build. It is fetched as a tag, since the engine stamps its version from it. Empty builds O(commit) alone.
    type: str
    required: true
  commit:
    description:
      - Commit (40 hex digits) that the tag must name.
      - Empty takes what this host recorded when it first met the tag, or records it now, with a warning.
    type: str
    default: ''
  builds_dir:
    description: Directory of builds, which M(ds4_host) made.
    type: path
    required: true
  state_dir:
    description: Directory for plans, results, logs of failed builds and commits recorded at first use.
    type: path
    required: true
  lib_dir:
    description: Directory of the mechanism; the unit enters its link C(current).
    type: path
    required: true
  user:
    description: Account that runs git and the compiler.
    type: str
    required: true
  cuda_home:
    description: Directory of the CUDA toolkit. Empty searches C(/usr/local/cuda), the newest C(/usr/local/cuda-*), then PATH.
    type: str
    default: ''
  nvcc:
    description: CUDA compiler. Empty takes that of O(cuda_home).
    type: str
    default: ''
  cuobjdump:
    description: Program that reads GPU code back. Empty takes that of O(cuda_home), then PATH.
    type: str
    default: ''
  arch:
    description: Architecture to compile for.
    type: str
    default: sm_121
  make_target:
    description: V(cuda-spark) for a DGX Spark; V(cuda) for O(arch) on any other card.
    type: str
    choices: [cuda-spark, cuda]
    default: cuda-spark
  expected_binaries:
    description: Programs that the build must make, C(ds4-server) among them.
    type: list
    elements: str
    required: true
  expected_sass:
    description: The one kind of GPU code that may be in the programs.
    type: str
    required: true
  jobs:
    description: Compilers at the same time. 0 takes what cores and O(memory_per_job_mib) allow.
    type: int
    default: 0
  memory_floor_mib:
    description: MemAvailable in MiB below which nothing is compiled.
    type: int
    required: true
  memory_per_job_mib:
    description: Memory in MiB above the floor that is reckoned for each compiler.
    type: int
    required: true
  timeout_seconds:
    description: Limit in seconds for fetching and compiling together.
    type: int
    required: true
  environment:
    description:
      - Further environment variables for git and the compiler, for example C(https_proxy) or C(GIT_SSL_CAINFO).
      - They are handed over in a file that only root reads, and logged nowhere.
    type: dict
    default: {}
    no_log: true
  check_tag_always:
    description: Ask the server what the tag names even when the build is there.
    type: bool
    default: false
  wait_seconds:
    description:
      - How long in seconds one call waits for the compiler. 0 waits until it ends.
      - The action plugin of the same name sets it, calls again, and shows the steps.
    type: int
    default: 0
  following:
    description: An earlier call started the build, and its result is asked for. Set by the action plugin.
    type: bool
    default: false
  unreachable_seconds:
    description: How long in seconds the host may be out of reach while it compiles. Used on the controller.
    type: int
    default: 300
  force:
    description: Build again beside what is there. The newest build is used from then on.
    type: bool
    default: false
attributes:
  check_mode:
    description: Predicts the id and path of the build, and finds tags that moved when it has to ask the server.
    support: full
  diff_mode:
    description: Path of the build that would appear.
    support: full
  platform:
    description: Linux with systemd, git, make, a C compiler and the CUDA toolkit.
    support: full
    platforms: posix
author:
  - ds4-fleet contributors
"""

EXAMPLES = r"""
- name: Build the pinned release for a DGX Spark
  ds4_build:
    release: v0.6.5
    commit: addc0c4bd6c664f8eed556df5c41f17990dcfcb6
    builds_dir: /opt/ds4/builds
    state_dir: /var/lib/ds4/state
    lib_dir: /opt/ds4/lib
    user: ds4
    expected_binaries: [ds4-server, ds4, ds4-bench]
    expected_sass: sm_121a
    memory_floor_mib: 2048
    memory_per_job_mib: 2048
    timeout_seconds: 1800
  register: cuda_build_result
"""

RETURN = r"""
build:
  description:
    - Record of the build, the content of its C(build.json); its schema is in docs/schemas/build.schema.json.
    - A prediction in check mode; C(binaries) is empty then.
  returned: success
  type: dict
  contains:
    id: {description: "Name of its directory, TAG-COMMIT8.", type: str, returned: always}
    path: {description: Its directory., type: str, returned: always}
    release: {description: Tag., type: str, returned: always}
    commit: {description: Commit., type: str, returned: always}
    version: {description: What C(ds4-server --version) says., type: str, returned: always}
    arch: {description: Architecture asked for., type: str, returned: always}
    sass: {description: GPU code found in the programs., type: list, elements: str, returned: always}
    toolchain: {description: Path and version of nvcc., type: dict, returned: always}
    binaries: {description: "Name, then sha256 and bytes.", type: dict, returned: always}
    seconds: {description: How long it took., type: float, returned: always}
    log: {description: Log of the compiler., type: str, returned: always}
running:
  description: Still true when O(wait_seconds) passed and the compiler goes on; C(step) says what it does.
  returned: while it runs
  type: bool
error:
  description: What failed, what was found and required, the cure, and evidence with the last lines of the compiler's log.
  returned: failure
  type: dict
ds4_summary:
  description: Line for the table at the end.
  returned: always
  type: dict
  sample: {room: cuda_build, state: ok, text: "v0.6.5 (addc0c4b), sm_121a, nvcc 13.0.88"}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ds4 import rooms
from ansible.module_utils.ds4.build import RunningError
from ansible.module_utils.ds4.errors import Ds4Error


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=rooms.BUILD_OPTIONS, supports_check_mode=True)
    # The environment may hold secrets: nothing logs it, nor does the record of the call. Results hold none of it, and Ansible
    # would hide every "1" in them that some variable is set to.
    options = dict(module.params)
    module.params["environment"] = None
    module.no_log_values.clear()
    try:
        result = rooms.have_build(options, module.check_mode)
    except RunningError as step:
        result = {"changed": True, "running": True, "step": str(step)}
    except Ds4Error as error:
        module.fail_json(**error.result(), ds4_summary={"room": rooms.BUILD, "state": "failed", "text": error.what})
    for warning in result.pop("warnings", []):
        module.warn(warning)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
