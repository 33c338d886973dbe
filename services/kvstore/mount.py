"""What kind of file system a path lies on, and how much it has free. Linux only.

Knows nothing of arenas.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system below a path, now."""

    file_system: str  # "tmpfs", "ext4", ...; "unknown" where the kernel does not list it
    free_bytes: int  # for this user; sys.maxsize where the mount has no limit


def mount_of(path: Path) -> Mount:
    """The mount that `path`, which exists, lies on.

    Raises:
        OSError: `path` or the list of mounts cannot be read.
    """
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    file_system = "unknown"
    for line in _MOUNTS.read_text().splitlines():
        # "36 35 98:0 /root /mount/point rw,noatime [optional fields] - ext3 /dev/root rw"
        fields, _, source = line.partition(" - ")
        if fields.split()[2] == wanted:
            file_system = source.split()[0]
            break
    sizes = os.statvfs(path)
    limited = sizes.f_blocks > 0
    return Mount(file_system, sizes.f_bavail * sizes.f_frsize if limited else sys.maxsize)
