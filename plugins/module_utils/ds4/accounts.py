# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What another user of this host may read: root, who asks, may read everything."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from typing import NamedTuple

from .errors import Ds4Error


class Account(NamedTuple):
    """A user with its groups, as the kernel would see a process of it."""

    uid: int
    gid: int
    groups: frozenset[int]


def account(user: str) -> Account:
    """Look up a user.

    Raises:
        Ds4Error: there is none of that name.
    """
    try:
        entry = pwd.getpwnam(user)
    except KeyError as error:
        raise Ds4Error(f"There is no user {user}", cure="run the role host_base (site.yml), which makes it") from error
    more = {group.gr_gid for group in grp.getgrall() if user in group.gr_mem}
    return Account(entry.pw_uid, entry.pw_gid, frozenset(more | {entry.pw_gid}))


def future_account(user: str) -> Account:
    """Like ``account``; a user that check mode only promises is one that owns nothing yet."""
    try:
        return account(user)
    except Ds4Error:
        return Account(-1, -1, frozenset())


def readable(found: os.stat_result, who: Account) -> bool:
    """May this account read a file with this owner and mode? (Folders on the way do not matter to a hard link.)"""
    if who.uid in (0, found.st_uid):
        return who.uid == 0 or bool(found.st_mode & stat.S_IRUSR)
    if found.st_gid in who.groups:
        return bool(found.st_mode & stat.S_IRGRP)
    return bool(found.st_mode & stat.S_IROTH)
