"""What a run of the compose test would leave on this machine if something went wrong.

Looks only for what bears the run's own name or is in its namespaces: others work here too. Interfaces,
firewall chains and mounts are part of a namespace, and go with it.
"""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_KINDS = ("mnt", "net", "ipc", "pid")
_USER = 10001  # of both images


def namespaces_of(process: str) -> set[str]:
    """Those that a process lives in, as the kernel names them ("net:[4026531840]"); none if it is gone."""
    try:
        return {str(Path(f"/proc/{process}/ns/{kind}").readlink()) for kind in _KINDS}
    except OSError:
        return set()


def left_by(place: Path, namespaces: set[str]) -> list[str]:
    """One line for each thing that is still there of a run; its cgroups, being empty, are removed.

    Args:
        place: the run's directory, whose name is that of its cgroups too.
        namespaces: in which it ran.
    """
    found = [f"directory {place}"] if place.exists() else []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            line = _read(entry / "cmdline").replace("\0", " ")
            if str(place) in line or namespaces & namespaces_of(entry.name):
                found.append(f"process {entry.name}: {line}")
    mounts = _read(Path("/proc/self/mountinfo")).splitlines()
    found += [f"mount {line}" for line in mounts if any(name in line for name in (str(place), *namespaces))]
    shared = Path("/dev/shm")
    found += [str(path) for path in shared.iterdir() if path.lstat().st_uid == _USER]
    for top in sorted(_CGROUPS.rglob(place.name)):
        for directory in [*sorted(top.rglob("*/"), reverse=True), top]:
            try:
                directory.rmdir()
            except OSError as error:
                found.append(f"cgroup {directory}: {error}")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it ended meanwhile
        return ""
