#!/bin/sh
# Run site.yml (or status.yml) for one owner without Ansible words: tools/apply.sh plan|apply|status
# Environment: HOST=user@address, INVENTORY=path, ADOPT=1, DETACH=1, ASK=1 (ask for the sudo password), ARGS="more options".
set -eu
mode=$1
cd "$(dirname "$0")/.."
bin=.venv/bin
# Named, since Ansible passes over the configuration of a folder that others may write, as every Windows folder looks in WSL.
export ANSIBLE_CONFIG="${ANSIBLE_CONFIG:-$PWD/ansible.cfg}"
playbook=site.yml
[ "$mode" = status ] && playbook=status.yml
set --
if [ -n "${HOST:-}" ] && [ -n "${INVENTORY:-}" ]; then
  echo "HOST and INVENTORY were both given. Cure: give one of them." >&2; exit 2
elif [ -n "${HOST:-}" ]; then
  case $HOST in *[!A-Za-z0-9.@:_-]*|"") echo "HOST=$HOST is not user@address. Cure: HOST=me@spark.local" >&2; exit 2 ;; esac
  mkdir -p .cache
  user=${HOST%@*} address=${HOST##*@}
  {
    echo "sparks:"; echo "  hosts:"; echo "    \"$address\":"
    [ "$user" = "$HOST" ] || echo "      ansible_user: \"$user\""
  } >.cache/host.yml
  set -- "$@" -i .cache/host.yml
elif [ -n "${INVENTORY:-}" ]; then
  set -- "$@" -i "$INVENTORY"
elif [ "$(id -u)" != 0 ] && ! sudo -n true 2>/dev/null; then
  ASK=1  # on the box itself, sudo wants a password: ask once, before anything starts
fi
[ "$mode" = plan ] && set -- "$@" --check --diff
[ -n "${ADOPT:-}" ] && set -- "$@" -e '{"engine_service_adopt": true}'
[ -n "${ASK:-}" ] && set -- "$@" --ask-become-pass
# shellcheck disable=SC2086  # ARGS is a list of options on purpose
if [ -n "${DETACH:-}" ]; then
  [ -z "${ASK:-}" ] || { echo "DETACH cannot ask for a sudo password. Cure: allow sudo without one, or run without DETACH." >&2; exit 2; }
  mkdir -p .cache
  log=.cache/apply-$(date +%Y%m%d-%H%M%S).log
  # A session of its own survives the end of this one; macOS has no setsid command.
  "$bin/python3" -c 'import os, sys; os.setsid(); os.execv(sys.argv[1], sys.argv[1:])' \
    "$bin/ansible-playbook" "$playbook" "$@" ${ARGS:-} >"$log" 2>&1 </dev/null &
  echo "Running as process $!. Follow it with: tail -f $log"
else
  exec "$bin/ansible-playbook" "$playbook" "$@" ${ARGS:-}
fi
