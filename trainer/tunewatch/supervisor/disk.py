"""What lies in a run's output folder, looked at off the watching thread: a hanging mount must not stop it."""

from __future__ import annotations

import os
import threading

from tunewatch.supervisor import checkpoints

LOOK_SECONDS = 15.0


class OutputFolder:
    """Checkpoints and free space of an output folder, as of the last look that came back.

    `checkpoints` is None while nobody has looked, `free_bytes` where the folder can not be read.
    """

    def __init__(self) -> None:
        self.checkpoints: list[checkpoints.Checkpoint] | None = None
        self.free_bytes: float | None = None
        self.free_inodes: int | None = None
        self.looked = 0
        """Looks that have come back."""
        self._thread: threading.Thread | None = None
        self._due = 0.0
        self._saves = 0.0

    def look(
        self,
        folder: str | None,
        now: float,
        *,
        saves: float,
        world_size: int | None = None,
        wait: float = 0.0,
    ) -> None:
        """Look again when it is time, or when the training has saved; `wait` seconds for the answer, if any.

        `world_size` is how many ranks of this machine would go on from a checkpoint.
        """
        self.join(wait)
        if folder is None or (self._thread is not None and self._thread.is_alive()):
            return
        if wait or now >= self._due or saves != self._saves:
            self._saves, self._due = saves, now + LOOK_SECONDS
            self._thread = threading.Thread(
                target=self._refresh, args=(folder, world_size), name="tunewatch-disk", daemon=True
            )
            self._thread.start()
            self.join(wait)

    def join(self, wait: float) -> None:
        """Wait for a look that is under way."""
        if self._thread is not None:
            self._thread.join(wait)

    def _refresh(self, folder: str, world_size: int | None) -> None:
        try:
            stat = os.statvfs(folder)
            self.free_bytes = float(stat.f_bavail * stat.f_frsize)
            self.free_inodes = stat.f_favail if stat.f_files else None  # btrfs and others count none
            self.checkpoints = checkpoints.scan(folder, known=self.checkpoints or (), world_size=world_size)
            self.looked += 1
        except OSError:
            self.free_bytes = self.free_inodes = None
