#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Door into ds4.machine and ds4.host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: spark_host_info
short_description: What a Spark is, what runs on it and what it lacks
description:
  - Architecture, releases, firmware, disks, mounts, listeners, engine processes, sessions, packages and names, in one
    round trip. Judges nothing and changes nothing.
  - Run it as root. Without, sockets and descriptors of other users stay unknown, and RV(euid) says so.
options:
  paths:
    description: Paths whose file system to look at. One that does not exist yet stands for its nearest existing parent.
    type: list
    elements: str
    default: []
  measure:
    description: Files and folders whose bytes on disk to measure. Folders are measured with all they hold.
    type: list
    elements: str
    default: []
  mounts:
    description: Paths that should be mount points.
    type: list
    elements: str
    default: []
  ports:
    description: TCP ports whose listeners to name.
    type: list
    elements: int
    default: []
  commands:
    description: Programs to look for on root's PATH.
    type: list
    elements: str
    default: []
  packages:
    description: Debian packages to look for.
    type: list
    elements: str
    default: []
  users:
    description: Accounts to look at.
    type: list
    elements: str
    default: []
  user_comment:
    description: Comment field (GECOS) that makes an account ours.
    type: str
    default: ""
  directories:
    description: Directories to look at. One with our marker file is ours.
    type: list
    elements: str
    default: []
  files:
    description: Text files to look at. One with our marker line is ours.
    type: list
    elements: str
    default: []
  units:
    description: Names of systemd units to look at. A unit file with our marker line is ours.
    type: list
    elements: str
    default: []
  lock_path:
    description: The engine's lock file, whose holder to name.
    type: str
    default: /tmp/ds4.lock
  package_locks:
    description: Lock files of the package manager, whose holders to name.
    type: list
    elements: str
    default: []
  remote_desktop_programs:
    description: Names of programs that stream a desktop; those that run come back in RV(remote_desktops).
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Reads in check mode as always.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
  platform:
    description: Linux.
    support: full
    platforms: posix
author:
  - ds4-fleet contributors
"""

EXAMPLES = r"""
- name: Look at the host
  spark_host_info:
    paths: [/opt/ds4, /var/lib/ds4/weights]
    ports: [8000]
    units: [ds4.service]
  register: host_verify_host
"""

RETURN = r"""
architecture:
  description: Machine name of the kernel.
  returned: always
  type: str
  sample: aarch64
kernel:
  description: Kernel release.
  returned: always
  type: str
  sample: 6.17.0-1014-nvidia
python:
  description: Version and path of the Python that ran this module.
  returned: always
  type: dict
  sample: {version: 3.12.3, executable: /usr/bin/python3}
euid:
  description: Effective user number; 0 is root.
  returned: always
  type: int
  sample: 0
os:
  description: C(id), C(version) and C(name) of os-release.
  returned: always
  type: dict
  sample: {id: ubuntu, version: "24.04", name: Ubuntu 24.04.3 LTS}
dgx:
  description: C(name), C(platform), C(image_version), C(ota_version) and the newest C(version) of dgx-release.
  returned: always
  type: dict
  sample: {name: DGX Spark, platform: DGX Server for KVM, image_version: 7.2.3, ota_version: 7.6.0, version: 7.6.0}
firmware:
  description: BIOS and product where the kernel shows them; empty strings elsewhere.
  returned: always
  type: dict
  sample: {bios_version: 5.36_0ACUM018, product_name: NVIDIA_DGX_Spark}
systemd:
  description: C(running), C(state) and C(version) of systemd.
  returned: always
  type: dict
  sample: {running: true, state: running, version: "255.4-1ubuntu8"}
clock:
  description: C(epoch) in seconds, C(utc), and C(ntp_synchronized), which is null when unknown.
  returned: always
  type: dict
  sample: {epoch: 1790000000, utc: "2026-09-21T14:13:20Z", ntp_synchronized: true}
display:
  description: Whether a display manager runs; null when systemd does not say.
  returned: always
  type: bool
  sample: true
sessions:
  description: Login sessions of people; null when logind cannot be asked.
  returned: always
  type: list
  elements: dict
  sample: [{id: "3", user: alice, type: wayland, graphical: true, remote: false, active: true, service: gdm-password}]
remote_desktops:
  description: Running programs out of O(remote_desktop_programs).
  returned: always
  type: list
  elements: dict
  sample: [{pid: 2200, user: alice, command: /usr/bin/sunshine, unit: user@1000.service}]
disks:
  description: The file system of each of O(paths). Two paths share one exactly when C(device) is the same.
  returned: always
  type: list
  elements: dict
  sample:
    - path: /var/lib/ds4/weights
      exists: false
      parent: /var/lib
      device: "259:2"
      mount: /
      filesystem: ext4
      source: /dev/nvme0n1p2
      total_bytes: 3936820625408
      free_bytes: 3200000000000
      read_only: false
measured:
  description: Bytes on disk of each of O(measure) and of the weights of running engines, with the device they lie on.
  returned: always
  type: list
  elements: dict
  sample: [{path: /home/alice/gguf, bytes: 93691352992, device: "259:2"}]
mounts:
  description: Whether each of O(mounts) is a mount point.
  returned: always
  type: list
  elements: dict
  sample: [{path: /data, mounted: true}]
listeners:
  description: Listening TCP sockets on O(ports). C(pid) is null when the owner cannot be seen.
  returned: always
  type: list
  elements: dict
  sample: [{address: 127.0.0.1, port: 8000, inode: 31337, pid: 812, user: ds4, command: /opt/ds4/x/ds4-server, unit: ds4.service}]
ds4_processes:
  description: Running programs of the engine, with the weights they hold.
  returned: always
  type: list
  elements: dict
cuda_processes:
  description: Processes that have C(/dev/nvidia-uvm) open, hence hold or can hold CUDA memory.
  returned: always
  type: list
  elements: dict
  sample: [{pid: 4711, user: alice, command: /usr/bin/python3 -m vllm, unit: docker.service}]
engine_lock:
  description: Who holds the engine's lock.
  returned: always
  type: list
  elements: dict
  sample: [{pid: 812, kind: FLOCK, user: ds4, command: /opt/ds4/x/ds4-server, unit: ds4.service}]
package_locks:
  description: Who holds a lock of the package manager.
  returned: always
  type: list
  elements: dict
  sample: [{path: /var/lib/dpkg/lock-frontend, pid: 990, kind: POSIX, user: root, command: /usr/bin/unattended-upgrade, unit: apt-daily-upgrade.service}]
missing_commands:
  description: Those of O(commands) that are absent.
  returned: always
  type: list
  elements: str
missing_packages:
  description: Those of O(packages) that are not installed; null when dpkg cannot be asked.
  returned: always
  type: list
  elements: str
users:
  description: Whether each of O(users) exists and is ours.
  returned: always
  type: list
  elements: dict
  sample: [{name: ds4, exists: true, ours: true, found: "uid 996"}]
directories:
  description: Whether each of O(directories) exists, is empty, and is ours.
  returned: always
  type: list
  elements: dict
  sample: [{path: /opt/ds4, exists: true, empty: false, ours: true, found: "owner root, 4 entries"}]
files:
  description: Whether each of O(files) exists and is ours.
  returned: always
  type: list
  elements: dict
  sample: [{path: /usr/local/bin/ds4-serve, exists: false, ours: false, found: ""}]
units:
  description: Whether each of O(units) exists and is ours.
  returned: always
  type: list
  elements: dict
  sample: [{name: ds4.service, path: /etc/systemd/system/ds4.service, exists: true, ours: true, found: /opt/ds4/current/ds4.service}]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ds4 import questions
from ansible.module_utils.ds4.errors import Ds4Error


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=questions.HOST_OPTIONS, supports_check_mode=True)
    try:
        result = questions.of_host(module.params)
    except Ds4Error as error:
        module.fail_json(**error.result())
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
