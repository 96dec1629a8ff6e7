# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Files that are on the host already: an installer's ~/gguf, an NFS or USB copy, the files of a running engine.

A candidate is hashed once and then linked, cloned or copied. Its owner's file is never altered, re-owned or re-moded; it
is taken only when that was asked for, and then at the very end. This part runs as root: only an owner or root may hard-link somebody's file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable
from typing import Any

from . import gguf, records
from .accounts import account, readable
from .errors import Ds4Error
from .files import fsync_directory, human_bytes, read_json, write_json
from .plan import Plan, PlanFile, segment_size

FICLONE = 0x40049409  # ioctl(2): share the blocks of another file (btrfs, xfs)


def candidates(item: PlanFile, paths: Iterable[str], directory: str) -> list[str]:
    """Files that may be the wanted one, those of the right name first: right length, regular, not ours already.

    Args:
        paths: files, or directories whose files are looked at (not those below).
        directory: our own; what lies there is no candidate.
    """
    found: dict[str, bool] = {}
    for path in paths:
        names = [path]
        if os.path.isdir(path):
            with contextlib.suppress(OSError):
                names = [os.path.join(path, name) for name in sorted(os.listdir(path))]
        for name in names:
            real = os.path.realpath(name)
            try:
                status = os.stat(real)
            except OSError:
                continue
            same_name = os.path.basename(name) == os.path.basename(item.file)
            fits = status.st_size == item.bytes if item.bytes is not None else same_name
            if stat.S_ISREG(status.st_mode) and fits and os.path.dirname(real) != os.path.realpath(directory):
                found[real] = found.get(real, False) or same_name
    return sorted(found, key=lambda real: not found[real])


class Judged:
    """Hashes of files that are not ours, so that 80 GiB are read once and not at every run."""

    def __init__(self, path: str) -> None:
        self._path = path
        value = read_json(path)
        self._known: dict[str, dict[str, Any]] = value if isinstance(value, dict) else {}

    def get(self, path: str) -> records.Hashed | None:
        """What was found in a file, if it is still the one that was read."""
        known = self._known.get(path)
        if not known:
            return None
        try:
            now = os.stat(path)
        except OSError:
            return None
        if (known["bytes"], known["mtime_ns"], known["inode"]) != (now.st_size, now.st_mtime_ns, now.st_ino):
            return None
        return records.Hashed(**known)

    def read(
        self, path: str, *, progress: Callable[[int], None] = lambda count: None, drop_cache: bool = False
    ) -> records.Hashed:
        """What is in a file: as remembered, or by reading all of it."""
        hashed = self.get(path)
        if hashed is None:
            step = segment_size(os.stat(path).st_size)
            hashed = records.hash_file(path, step, progress=progress, drop_cache=drop_cache)
            self.remember(path, hashed)
        return hashed

    def remember(self, path: str, hashed: records.Hashed) -> None:
        """Keep a result."""
        self._known[path] = hashed._asdict()
        os.makedirs(os.path.dirname(self._path), exist_ok=True)
        write_json(self._path, self._known)


class Adoption:
    """Adopts what can be adopted for one plan.

    Args:
        plan: what is wanted; ``plan.adopt`` says where to look.
        judged: memory of earlier looks.
        note: called with one sentence per event.
        progress: called with (role, path, bytes read).
        move: take the file instead of sharing it, once it is ours in every other way.
    """

    def __init__(
        self,
        plan: Plan,
        judged: Judged,
        *,
        note: Callable[[str], None],
        progress: Callable[[PlanFile, str, int], None] = lambda item, path, count: None,
        move: bool = False,
    ) -> None:
        self._plan = plan
        self._judged = judged
        self._note = note
        self._progress = progress
        self._move = move
        self._who = account(plan.user)

    def run(self) -> list[dict[str, str]]:
        """Adopt every missing file that is somewhere on this host: ``[{role, path, how}]``."""
        adopted = []
        for item in self._plan.files:
            target = self._plan.path(item)
            paths = candidates(item, self._plan.adopt, self._plan.directory)
            if os.path.lexists(target):
                if os.path.islink(target) or readable(os.stat(target), self._who):
                    continue  # the fetcher judges it
                paths = [target]  # shared with an owner who has closed it since: a copy of our own
            for path in paths:
                try:
                    how = self._adopt(item, path, target)
                except (OSError, Ds4Error) as error:
                    self._note(f"{path} was not adopted: {error}")
                    continue
                if how:
                    adopted.append({"role": item.role, "path": path, "how": how})
                    break
        return adopted

    def _adopt(self, item: PlanFile, path: str, target: str) -> str:
        if not item.sha256:  # nobody says what it must be
            if not readable(os.stat(path), self._who):  # nothing of another user is copied into his reach
                raise Ds4Error(
                    f"{path} cannot be read by {self._plan.user} and has no published hash",
                    cure=f"let {self._plan.user} read it, or add its sha256 to ds4_weights_extra",
                )
            if item.target.endswith(".gguf"):
                gguf.check_file(path)
        if self._judged.get(path) is None:
            self._note(f"reading {path} to see whether it is {item.target}")
        hashed = self._judged.read(
            path, progress=lambda count: self._progress(item, path, count), drop_cache=self._plan.drop_cache
        )
        if item.sha256 and hashed.sha256 != item.sha256:
            called = self._plan.known.get(hashed.sha256, "")
            self._note(
                f"{path} is not {item.target}: sha256 {hashed.sha256}" + (f", which is {called}" if called else "")
            )
            return ""
        status = os.stat(path)
        temporary = os.path.join(self._plan.directory, f".{item.target}.adopted")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        move = self._move and path != target
        how = self._place(path, temporary, hashed, may_link=move or readable(status, self._who))
        now, then = os.stat(temporary), (hashed.mtime_ns, hashed.bytes)
        if how == "reflinked" and (os.stat(path).st_mtime_ns, os.stat(path).st_size) != then:
            os.unlink(temporary)
            raise Ds4Error(f"{path} changed while it was cloned", cure="run again when nobody writes to it")
        hashed = hashed if how == "linked" else hashed._replace(mtime_ns=now.st_mtime_ns, inode=now.st_ino)
        how = "moved" if move else how
        trust = "manifest" if item.sha256 else records.FIRST_USE
        known = records.read(path) if path == target else None
        source = known["source"] if known else path
        entry = {"role": item.role, "generation": self._plan.generation, "repo": item.repo, "revision": item.revision}
        records.write(target, records.make(target, entry, hashed, how=how, source=source, trust=trust))
        os.replace(temporary, target)
        fsync_directory(self._plan.directory)
        problem = records.quick_check(target, item.sha256)
        if problem:
            raise Ds4Error(
                f"{path} changed while it was adopted", found=problem, cure="run again when nobody writes to it"
            )
        if move:
            self._take(path, target, status)
        self._note(f"{item.target}: adopted from {path} ({how})")
        if trust == records.FIRST_USE:
            self._note(records.first_use(item.target, hashed.sha256))
        return how

    def _take(self, path: str, target: str, status: os.stat_result) -> None:
        """The last step of a move: a kill before it leaves two names, never none."""
        handle = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fchown(handle, self._who.uid, self._who.gid)
            os.fchmod(handle, 0o644)
        finally:
            os.close(handle)
        now = os.lstat(path)
        if (now.st_ino, now.st_size, now.st_mtime_ns) == (status.st_ino, status.st_size, status.st_mtime_ns):
            os.unlink(path)
            fsync_directory(os.path.dirname(path))

    def _place(self, path: str, temporary: str, hashed: records.Hashed, *, may_link: bool) -> str:
        """Give the content a second name in our directory, in the cheapest way that the service user can read."""
        # Of folders, since a file on an overlay may have another device number than its folder.
        same_disk = os.stat(os.path.dirname(path)).st_dev == os.stat(self._plan.directory).st_dev
        if same_disk and may_link:
            try:
                os.link(path, temporary, follow_symlinks=False)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                    raise
            else:
                return "linked"
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            how = "reflinked" if self._clone(path, handle) else self._copy(path, handle, hashed)
            os.fchown(handle, self._who.uid, self._who.gid)
            os.fsync(handle)
        except BaseException:
            os.unlink(temporary)
            raise
        finally:
            os.close(handle)
        return how

    @staticmethod
    def _clone(path: str, handle: int) -> bool:
        source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(handle, FICLONE, source)
        except OSError:
            return False
        finally:
            os.close(source)
        return True

    def _copy(self, path: str, handle: int, hashed: records.Hashed) -> str:
        place = os.fstatvfs(handle)
        free = place.f_bavail * place.f_frsize
        if hashed.bytes > free:
            raise Ds4Error(
                f"{path} cannot be shared with {self._plan.user}, and there is no room for a copy",
                found=f"{human_bytes(free)} free in {self._plan.directory}",
                required=human_bytes(hashed.bytes),
                cure=f"let {self._plan.user} read it (chmod o+r), or set weights_adopt_move: true",
            )
        again = records.hash_file(path, hashed.segment_bytes, drop_cache=self._plan.drop_cache, copy_to=handle)
        if again.sha256 != hashed.sha256:
            raise Ds4Error(f"{path} changed while it was copied", cure="run again when nobody writes to it")
        return "copied"
