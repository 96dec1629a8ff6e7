# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The mechanism of ds4-fleet: plain Python (3.9+), standard library only (the fetcher adds requests), no Ansible import.

The same files are entered through two doors: ``ansible.module_utils.ds4`` inside a module, and
``python3 -m ds4.<part>`` from systemd units on a host, where they are installed under /opt/ds4/lib.
"""

from __future__ import annotations
