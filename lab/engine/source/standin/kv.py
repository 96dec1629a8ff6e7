"""KV on disk: one file per prompt, named by its sha1, holding the prompt in plain text, within a budget."""

from __future__ import annotations

import hashlib
import os
import re

from common import FatalError, log

BYTES_PER_TOKEN = 4711  # about 4.6 KiB a token


class DiskCache:
    def __init__(self, directory: str | None, budget_mib: int, generation: str) -> None:
        self._directory = directory
        self._budget = budget_mib * 1024 * 1024
        self._generation = generation
        if directory:
            try:
                os.makedirs(directory, mode=0o700, exist_ok=True)
                self._files()
            except OSError as error:
                raise FatalError(f"ds4-server: --kv-disk-dir {directory}: {error.strerror}") from None

    def _path(self, prompt: str) -> str:
        name = hashlib.sha1(f"{self._generation}\n{prompt}".encode(), usedforsecurity=False).hexdigest() + ".kv"
        return os.path.join(self._directory or "", name)

    def holds(self, prompt: str) -> bool:
        return bool(self._directory) and os.path.isfile(self._path(prompt))

    def store(self, prompts: dict[str, int], reason: str) -> None:
        """Write prompts (text → tokens); the oldest files go when the budget is exceeded."""
        if not self._directory:
            return
        try:
            for prompt, tokens in prompts.items():
                path = self._path(prompt)
                with open(path + ".new", "wb") as stream:
                    os.fchmod(stream.fileno(), 0o600)
                    stream.write(f"ds4kv {reason} {tokens}\n{prompt}\n".encode())
                    stream.truncate(max(stream.tell(), tokens * BYTES_PER_TOKEN))
                os.replace(path + ".new", path)
            files = self._files()
            while files and sum(size for _, size, _ in files) > self._budget:
                os.unlink(files.pop(0)[2])
            log(f"ds4-server: kv disk: {len(prompts)} stored, reason {reason}")
        except OSError as error:
            log(f"ds4-server: kv disk: store failed: {error.strerror}")

    def _files(self) -> list[tuple[float, int, str]]:
        found = []
        for entry in os.scandir(self._directory):
            if re.fullmatch(r"[0-9a-f]{40}\.kv", entry.name):
                status = entry.stat()
                found.append((status.st_mtime, status.st_size, entry.path))
        return sorted(found)
