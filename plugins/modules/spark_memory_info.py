#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Door into ds4.memory."""

from __future__ import annotations

DOCUMENTATION = r"""
module: spark_memory_info
short_description: Memory of a Spark from meminfo, and who uses it
description:
  - Reads C(/proc/meminfo). What counts is MemAvailable. MemFree is small on a healthy host, since the page cache uses
    what is free and gives it back.
  - Can wait on the host, bounded, until enough memory is available.
  - Changes nothing.
options:
  meminfo_path:
    description: File to read.
    type: str
    default: /proc/meminfo
  wait_available_kib:
    description: Wait until MemAvailable is at least this many KiB. 0 does not wait.
    type: int
    default: 0
  timeout_seconds:
    description: Limit in seconds of the wait. Past it the module fails with both numbers.
    type: int
    default: 120
  processes:
    description: How many of the largest processes to name.
    type: int
    default: 5
  tmpfs_minimum_kib:
    description: Name memory file systems that hold at least this many KiB.
    type: int
    default: 65536
attributes:
  check_mode:
    description: Reads in check mode as always, and does not wait.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
  platform:
    description: Linux 3.14 or newer (MemAvailable).
    support: full
    platforms: posix
author:
  - ds4-fleet contributors
"""

EXAMPLES = r"""
- name: Look at memory
  spark_memory_info:
  register: host_verify_memory

- name: Wait until a stopped engine has given its memory back
  spark_memory_info:
    wait_available_kib: 104857600
    timeout_seconds: 300
"""

RETURN = r"""
mem_total_kib:
  description: MemTotal in KiB.
  returned: always
  type: int
  sample: 127535152
mem_available_kib:
  description: MemAvailable in KiB.
  returned: always
  type: int
  sample: 115343360
mem_free_kib:
  description: MemFree in KiB.
  returned: always
  type: int
  sample: 3145728
cached_kib:
  description: Page cache (Cached) in KiB.
  returned: always
  type: int
  sample: 94371840
swap_total_kib:
  description: SwapTotal in KiB.
  returned: always
  type: int
  sample: 16777212
swap_free_kib:
  description: SwapFree in KiB.
  returned: always
  type: int
  sample: 16777212
booked_kib:
  description:
    - Unreclaimable memory in KiB that meminfo has a name for (programs, shared memory, kernel).
    - The rest of what is not available was allocated by the GPU driver.
  returned: always
  type: int
  sample: 4194304
processes:
  description: Largest processes by memory of their own (anonymous and shared, without mapped files).
  returned: always
  type: list
  elements: dict
  sample: [{pid: 2114, user: alice, command: /usr/bin/gnome-shell, unit: user@1000.service, resident_kib: 512000}]
tmpfs:
  description: Memory file systems that hold much.
  returned: always
  type: list
  elements: dict
  sample: [{path: /dev/shm, used_kib: 2097152}]
waited_seconds:
  description: How long O(wait_available_kib) took.
  returned: always
  type: float
  sample: 1.5
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ds4 import questions
from ansible.module_utils.ds4.errors import Ds4Error


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=questions.MEMORY_OPTIONS, supports_check_mode=True)
    try:
        result = questions.of_memory(module.params, check=module.check_mode)
    except Ds4Error as error:
        module.fail_json(**error.result())
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
