#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Door into ds4.questions, ds4.rooms and ds4.staging for several questions at once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: ds4_look
short_description: Several questions to a host in one round trip; changes nothing
description:
  - On a fleet a round trip costs more than most answers. This module answers together what C(spark_gpu_info),
    C(spark_memory_info) and C(spark_host_info) answer alone.
  - It also asks the rooms of staging what they would change. A room with nothing to do is I(settled); its task need not run.
  - And what deployment stands there, for the action plugin of C(ds4_deployment) to compare with what it would stage.
  - A question that cannot be answered says so in its own answer; the others still speak.
options:
  gpu:
    description: Options of C(spark_gpu_info).
    type: dict
  memory:
    description: Options of C(spark_memory_info).
    type: dict
  host:
    description: Options of C(spark_host_info).
    type: dict
  base:
    description: Options of C(ds4_host).
    type: dict
  build:
    description: Options of C(ds4_build).
    type: dict
    no_log: true
  weights:
    description: Options of C(ds4_weights).
    type: dict
  deployment:
    description: C(layout) and C(device_groups) as for C(ds4_deployment), and the names of its C(helpers).
    type: dict
attributes:
  check_mode:
    description: Only reads, so check mode makes no difference.
    support: full
  diff_mode:
    description: Nothing changes.
    support: none
  platform:
    description: Linux with systemd.
    support: full
    platforms: posix
author: [ds4-fleet]
"""

EXAMPLES = r"""
- name: Look at GPU and memory
  ds4_look:
    gpu: {}
    memory: {}
  register: host_verify_look

- name: See whether there is anything to build
  ds4_look:
    build: "{{ cuda_build_arguments }}"
  register: host_verify_look
"""

RETURN = r"""
gpu:
  description: Result of C(spark_gpu_info), or C(failed) and C(msg).
  returned: O(gpu)
  type: dict
memory:
  description: Result of C(spark_memory_info), or C(failed) and C(msg).
  returned: O(memory)
  type: dict
host:
  description: Result of C(spark_host_info), or C(failed) and C(msg).
  returned: O(host)
  type: dict
settled:
  description: Results of C(base), C(build) and C(weights), of those alone that have nothing to do.
  returned: always
  type: dict
standing:
  description: The deployment that serves, with a fingerprint of all its texts; empty when it needs a hand in any case.
  returned: O(deployment)
  type: dict
ds4_summaries:
  description: Lines for the table at the end, of the settled rooms.
  returned: always
  type: list
  elements: dict
"""

from collections.abc import Callable
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.module_utils.ds4.errors import Ds4Error

Door = tuple[dict[str, dict[str, Any]], Callable[[dict[str, Any]], Any]]  # options, and what answers
QUESTIONS, ROOMS, DEPLOYMENT = ("gpu", "memory", "host"), ("base", "build", "weights"), "deployment"


def doors(asked: set[str]) -> dict[str, Door]:
    """Those of the wanted kinds: a module's imports are compiled at each call, so only what is asked for is imported."""
    found: dict[str, Door] = {}
    if not asked.isdisjoint(QUESTIONS):
        from ansible.module_utils.ds4 import questions

        found["gpu"] = (questions.GPU_OPTIONS, questions.of_gpu)
        found["memory"] = (questions.MEMORY_OPTIONS, questions.of_memory)
        found["host"] = (questions.HOST_OPTIONS, questions.of_host)
    if not asked.isdisjoint(ROOMS):
        from ansible.module_utils.ds4 import rooms

        found["base"] = (rooms.BASE_OPTIONS, rooms.settled_base)
        found["build"] = (rooms.BUILD_OPTIONS, rooms.settled_build)
        found["weights"] = (rooms.WEIGHTS_OPTIONS, rooms.settled_weights)
    if DEPLOYMENT in asked:
        from ansible.module_utils.ds4 import staging

        found[DEPLOYMENT] = (staging.STANDING_OPTIONS, staging.standing)
    return found


def answered(question: Callable[[dict[str, Any]], dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    """The answer, or why there is none: whatever stops one question must not silence the others."""
    try:
        return question(options)
    except Ds4Error as error:
        return {"failed": True, **error.result()}
    except Exception as error:
        return {"failed": True, "msg": f"{type(error).__name__}: {error}"}


def when_settled(
    room: Callable[[dict[str, Any]], dict[str, Any] | None], options: dict[str, Any]
) -> dict[str, Any] | None:
    """The room's result when it has nothing to do; what stands in its way is met again, and told, by its own task."""
    try:
        return room(options)
    except Exception:
        return None


def main() -> None:
    """Entry point."""
    options: dict[str, dict[str, Any]] = {name: {"type": "dict"} for name in (*QUESTIONS, *ROOMS, DEPLOYMENT)}
    options["build"]["no_log"] = True
    module = AnsibleModule(argument_spec=options, supports_check_mode=True)
    asked = {name: given for name, given in module.params.items() if given is not None}
    module.params["build"] = None  # its environment may hold secrets; see ds4_build
    module.no_log_values.clear()
    known = doors(set(asked))
    for name, given in asked.items():
        valid = ArgumentSpecValidator(known[name][0]).validate(given)
        if valid.error_messages:
            module.fail_json(msg=f"{name}: {'; '.join(valid.error_messages)}")
        asked[name] = valid.validated_parameters
    answers = {name: answered(known[name][1], asked[name]) for name in QUESTIONS if name in asked}
    settled = {name: found for name in ROOMS if name in asked and (found := when_settled(known[name][1], asked[name]))}
    if DEPLOYMENT in asked:
        answers["standing"] = when_settled(known[DEPLOYMENT][1], asked[DEPLOYMENT]) or {}
    for found in settled.values():
        for warning in found.pop("warnings", []):
            module.warn(warning)
    summaries = [found["ds4_summary"] for found in settled.values()]
    module.exit_json(changed=False, settled=settled, ds4_summaries=summaries, **answers)


if __name__ == "__main__":
    main()
