"""What kind of file system a path lies on, how much it has free, whether its pages may be huge.

Linux only. Knows nothing of arenas.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes blanks and the like


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system below a path, now."""

    file_system: str  # "tmpfs", "ext4", ...; "unknown" where the kernel does not list it
    size_bytes: int  # its limit; 0 = none
    free_bytes: int  # for this user; sys.maxsize where the mount has no limit
    point: Path  # where it is mounted
    huge: str  # a tmpfs's huge pages: "never", "advise", "within_size" or "always"

    @property
    def allows_huge(self) -> bool:
        """Whether a mapping that asks for huge pages (MADV_HUGEPAGE) gets them."""
        return self.huge != "never"

    def enlarged(self, lacking: int) -> str:
        """The command that makes room for `lacking` bytes more than are in use."""
        size = self.size_bytes - self.free_bytes + lacking
        return f"mount -o remount,size={-(-size // 2**20)}m {self.point}"


def mount_of(path: Path) -> Mount:
    """The mount that `path`, which exists, lies on.

    Raises:
        OSError: `path` or the list of mounts cannot be read.
    """
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    file_system, point, options = "unknown", path, ""
    for line in _MOUNTS.read_text().splitlines():
        # "36 35 98:0 /root /mount/point rw,noatime [optional fields] - ext3 /dev/root rw,errors=continue"
        fields, _, source = line.partition(" - ")
        parts = fields.split()
        if parts[2] == wanted:
            file_system, _, options = source.split(maxsplit=2)
            point = Path(_OCTAL.sub(lambda found: chr(int(found[1], 8)), parts[4]))
            break
    sizes = os.statvfs(path)
    return Mount(
        file_system,
        size_bytes=sizes.f_blocks * sizes.f_frsize,
        free_bytes=sizes.f_bavail * sizes.f_frsize if sizes.f_blocks else sys.maxsize,
        point=point,
        huge=_huge(options.split(",")),
    )


def _huge(options: list[str]) -> str:
    """The kernel leaves `huge=never` out; its own switch can overrule every mount."""
    switch = _SHMEM_ENABLED.read_text() if _SHMEM_ENABLED.exists() else "[deny]"  # built without them
    if "[deny]" in switch:
        return "never"
    if "[force]" in switch:
        return "always"
    return next((option.removeprefix("huge=") for option in options if option.startswith("huge=")), "never")
