#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Door into ds4.gpu and ds4.toolkit."""

from __future__ import annotations

DOCUMENTATION = r"""
module: spark_gpu_info
short_description: GPUs, driver and CUDA toolkit of a Spark, or why there is none
description:
  - Asks C(nvidia-smi) for every GPU and says why when it does not answer.
  - Finds the CUDA toolkit by explicit path, since its C(bin) folder is on no PATH over SSH or sudo.
  - Never asks for GPU memory. On GB10 the GPU shares the memory of the host and C(nvidia-smi) answers C([N/A]);
    use M(spark_memory_info).
  - Judges nothing and changes nothing.
options:
  cuda_home:
    description:
      - Folder of the CUDA toolkit to take. A named one is taken or refused, never replaced by another.
      - An empty string searches C(/usr/local/cuda), then the newest C(/usr/local/cuda-*), then PATH.
    type: str
    default: ""
  toolkit_files:
    description: Paths relative to the toolkit that a build needs; those that are absent come back in RV(toolkit).
    type: list
    elements: str
    default: []
  timeout_seconds:
    description: Limit in seconds for each call of C(nvidia-smi) and C(nvcc). None follows an C(nvidia-smi) that hung.
    type: int
    default: 20
attributes:
  check_mode:
    description: Reads in check mode as always.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
  platform:
    description: Linux with the NVIDIA driver; answers with a diagnosis where there is none.
    support: full
    platforms: posix
author:
  - ds4-fleet contributors
"""

EXAMPLES = r"""
- name: Look at the GPU
  spark_gpu_info:
  register: host_verify_gpu

- name: Take a toolkit of another version
  spark_gpu_info:
    cuda_home: /usr/local/cuda-13.1
    toolkit_files: [include/cublas_v2.h]
  register: host_verify_gpu
"""

RETURN = r"""
gpus:
  description: Every GPU. A value that nvidia-smi does not know is an empty string.
  returned: always
  type: list
  elements: dict
  contains:
    name:
      description: Product name.
      type: str
      sample: NVIDIA GB10
    compute_cap:
      description: Compute capability, a string.
      type: str
      sample: "12.1"
    driver:
      description: Driver version.
      type: str
      sample: 580.95.05
    vbios:
      description: VBIOS version.
      type: str
      sample: 9A.0B.16.00.00
    uuid:
      description: Identity of the GPU.
      type: str
      sample: GPU-3f8b5c2e-0000-0000-0000-000000000000
driver:
  description: Driver version; that of the loaded kernel module when nvidia-smi fails; empty when unknown.
  returned: always
  type: str
  sample: 580.95.05
kernel_module:
  description: Version of the loaded kernel module, empty when none is loaded.
  returned: always
  type: str
  sample: 580.95.05
cuda_supported:
  description: Newest CUDA version that the driver supports, empty when unknown.
  returned: always
  type: str
  sample: "13.0"
diagnosis:
  description: One of C(ok), C(no_driver), C(mismatch), C(no_device), C(timeout), C(unparsable).
  returned: always
  type: str
  sample: ok
text:
  description: What nvidia-smi said when the diagnosis is not C(ok), shortened.
  returned: always
  type: str
  sample: No devices were found
toolkit:
  description: The toolkit to build with; empty strings when there is none.
  returned: always
  type: dict
  contains:
    home:
      description: Folder of the toolkit.
      type: str
      sample: /usr/local/cuda
    nvcc:
      description: Path of its compiler.
      type: str
      sample: /usr/local/cuda/bin/nvcc
    cuobjdump:
      description: Path of cuobjdump, beside nvcc or on PATH.
      type: str
      sample: /usr/local/cuda/bin/cuobjdump
    release:
      description: CUDA release.
      type: str
      sample: "13.0"
    version:
      description: Full version of nvcc.
      type: str
      sample: 13.0.88
    source:
      description: How it was found. One of C(variable), C(default), C(versioned), C(path), or empty.
      type: str
      sample: default
    candidates:
      description: Every nvcc that was looked at, with its version or the error.
      type: list
      elements: dict
    missing:
      description: Those of O(toolkit_files) that are absent.
      type: list
      elements: str
    text:
      description: Why there is no toolkit.
      type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.ds4 import questions
from ansible.module_utils.ds4.errors import Ds4Error


def main() -> None:
    """Entry point."""
    module = AnsibleModule(argument_spec=questions.GPU_OPTIONS, supports_check_mode=True)
    try:
        result = questions.of_gpu(module.params)
    except Ds4Error as error:
        module.fail_json(**error.result())
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
