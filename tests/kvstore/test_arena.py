from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from services.contract.errors import InvalidRequest, SetupError
from services.contract.file_header import FileHeader
from services.contract.layout import FILE_HEADER_BYTES
from services.contract.mount import mount_of
from services.contract.planes import Plane, PlaneLayer
from services.kvstore.arena import ARENA_NAME, Arena
from tests.kvstore.world import ARENA_BYTES, HEADER, OTHER_HEADER, PAGE_COUNT


def test_a_new_arena_is_private_sparse_and_blank(shm: Path) -> None:
    arena = Arena.open(shm / "arena", ARENA_BYTES)
    found = arena.path.stat()
    assert (found.st_size, stat.S_IMODE(found.st_mode)) == (ARENA_BYTES, 0o600)
    assert stat.S_IMODE(arena.path.parent.stat().st_mode) == 0o700
    assert arena.resident_bytes <= 4096
    assert (arena.header, arena.layout, arena.reopened) == (None, None, False)
    with pytest.raises(SetupError, match="not laid out"):
        arena.page_headers()
    arena.close(keep=False)
    assert list(shm.iterdir()) == []


def test_a_directory_that_was_there_stays(shm: Path) -> None:
    Arena.open(shm, ARENA_BYTES).close(keep=False)
    assert list(shm.iterdir()) == []


def test_the_next_kvstore_removes_the_directory_that_a_killed_one_made(shm: Path) -> None:
    Arena.open(shm / "arena", ARENA_BYTES).close(keep=True)
    Arena.open(shm / "arena", ARENA_BYTES).close(keep=False)
    assert list(shm.iterdir()) == []


def test_strangers_files_and_their_directory_stay(shm: Path) -> None:
    arena = Arena.open(shm / "arena", ARENA_BYTES)
    (shm / "arena" / "notes.txt").write_text("mine")
    arena.close(keep=False)
    assert (shm / "arena" / "notes.txt").read_text() == "mine"


def test_reopening_finds_layout_headers_and_bytes(shm: Path) -> None:
    arena = Arena.open(shm / "arena", ARENA_BYTES)
    layout = arena.lay_out(HEADER)
    assert layout.page_count == PAGE_COUNT
    arena.page_headers()["generation"][3] = 5
    with arena.path.open("r+b") as file:
        file.seek(layout.layer_offset("kv", 1))
        file.write(b"records")
    assert (arena.next_epoch(), arena.next_epoch()) == (1, 2)
    arena.close(keep=True)
    again = Arena.open(shm / "arena", ARENA_BYTES)
    assert (again.reopened, again.header, again.layout) == (True, HEADER, layout)
    assert again.page_headers()["generation"].tolist() == [0, 0, 0, 5, 0, 0, 0, 0, 0, 0]
    assert again.path.read_bytes()[layout.layer_offset("kv", 1) :].startswith(b"records")
    assert again.next_epoch() == 3
    again.close(keep=False)


def test_a_new_layout_never_goes_back_a_generation(shm: Path) -> None:
    arena = Arena.open(shm / "arena", ARENA_BYTES)
    arena.lay_out(HEADER)
    arena.page_headers()["generation"][9] = 7
    assert arena.lay_out(OTHER_HEADER).page_count < PAGE_COUNT  # page 9 is gone, and its generation with it
    assert set(arena.page_headers()["generation"].tolist()) == {7}
    arena.lay_out(HEADER)
    assert set(arena.page_headers()["generation"].tolist()) == {7}
    arena.close(keep=False)


def test_killed_while_laying_out_anew(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.open(shm / "arena", ARENA_BYTES)
    arena.lay_out(HEADER)
    arena.page_headers()["generation"][0] = 7

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("services.kvstore.arena.write_file_header", killed)
        with pytest.raises(KeyboardInterrupt):
            arena.lay_out(OTHER_HEADER)
    arena.close(keep=True)
    again = Arena.open(shm / "arena", ARENA_BYTES)
    assert again.layout is None
    again.lay_out(HEADER)
    assert set(again.page_headers()["generation"].tolist()) == {7}
    again.close(keep=False)


def test_a_geometry_that_does_not_fit_changes_nothing(shm: Path) -> None:
    arena = Arena.open(shm / "arena", ARENA_BYTES)
    arena.lay_out(HEADER)
    large = FileHeader(64, bytes(32), (Plane("kv", (PlaneLayer(1, 1, ARENA_BYTES),)),))
    with pytest.raises(SetupError, match="holds no page of 4 MiB"):
        arena.lay_out(large)
    wild = tuple(PlaneLayer(1, 1 + number % 2, 16) for number in range(8000))
    with pytest.raises(InvalidRequest, match="has room for"):
        arena.lay_out(FileHeader(64, bytes(32), (Plane("kv", wild),)))
    arena.close(keep=True)
    again = Arena.open(shm / "arena", ARENA_BYTES)
    assert again.header == HEADER
    again.close(keep=False)


def test_a_second_kvstore_is_refused(shm: Path) -> None:
    arena = Arena.open(shm, ARENA_BYTES)
    with pytest.raises(SetupError, match=r"another kvstore holds .*arena\.bin; stop it, or give"):
        Arena.open(shm, ARENA_BYTES)
    assert arena.path.exists()
    arena.close(keep=False)


def refused(directory: Path, message: str, arena_bytes: int = ARENA_BYTES) -> None:
    """Opening is refused, and the file that was there is left byte for byte."""
    path = directory / ARENA_NAME
    before = path.read_bytes()
    with pytest.raises(SetupError, match=message):
        Arena.open(directory, arena_bytes)
    assert path.read_bytes() == before


def test_files_that_are_not_opened_and_not_touched(shm: Path) -> None:
    arena = Arena.open(shm, ARENA_BYTES)
    arena.lay_out(HEADER)
    arena.close(keep=True)
    refused(shm, f"start with --arena-bytes {ARENA_BYTES}, or delete", ARENA_BYTES + 4096)
    refused(shm, f"start with --arena-bytes {ARENA_BYTES}, or delete", ARENA_BYTES - 4096)
    good = arena.path.read_bytes()
    for offset, message in ((0, "not hotset's"), (8, "layout version"), (70, "damaged")):
        arena.path.write_bytes(good[:offset] + bytes([good[offset] ^ 0xFF]) + good[offset + 1 :])
        refused(shm, message)
    arena.path.write_bytes(b"HOTSETAR")
    refused(shm, "is 8|has 8 bytes and --arena-bytes asks")


def test_a_file_shorter_than_its_header(shm: Path) -> None:
    (shm / ARENA_NAME).write_bytes(bytes(100))
    refused(shm, "less than its header", 100)


def test_killed_before_the_file_had_its_length(shm: Path) -> None:
    (shm / ARENA_NAME).touch()
    arena = Arena.open(shm, ARENA_BYTES)
    assert not arena.reopened
    arena.close(keep=False)


def test_no_room_on_the_mount(shm: Path) -> None:
    free = mount_of(shm).free_bytes
    with pytest.raises(
        SetupError,
        match=rf"smaller --arena-bytes, or enlarge it: mount -o remount,size=\d+m {mount_of(shm).point} ",
    ):
        Arena.open(shm / "arena", free + 2**30)
    assert list(shm.iterdir()) == []


def test_what_lies_in_memory_already_needs_no_more_room(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shm / ARENA_NAME
    path.write_bytes(bytes(ARENA_BYTES))
    full = replace(mount_of(shm), free_bytes=0)
    monkeypatch.setattr("services.kvstore.arena.mount_of", lambda _: full)
    arena = Arena.open(shm, ARENA_BYTES)
    arena.close(keep=False)
    with pytest.raises(SetupError, match="needs 4 MiB more"):
        Arena.open(shm, ARENA_BYTES)


def test_not_a_tmpfs(tmp_path: Path) -> None:
    if mount_of(tmp_path).file_system == "tmpfs":
        pytest.skip("the temporary directory of this machine is a tmpfs")
    with pytest.raises(SetupError, match=r"an arena must lie in memory.*mount -t tmpfs"):
        Arena.open(tmp_path / "arena", ARENA_BYTES)
    assert list(tmp_path.iterdir()) == []


def test_directories_that_cannot_be(shm: Path) -> None:
    with pytest.raises(SetupError, match=r"no/arena: No such file or directory; choose"):
        Arena.open(shm / "no" / "arena", ARENA_BYTES)
    (shm / "file").touch()
    with pytest.raises(SetupError, match="Not a directory; choose"):
        Arena.open(shm / "file", ARENA_BYTES)
    if os.geteuid() != 0:
        (shm / "closed").mkdir(mode=0o500)
        with pytest.raises(
            SetupError, match=rf"Permission denied; choose .* chown -R {os.geteuid()} /dev/shm/"
        ):
            Arena.open(shm / "closed", ARENA_BYTES)


@pytest.mark.parametrize(
    ("options", "switch", "huge"),
    [
        ("rw,size=8k", "always within_size advise [never] deny force", "never"),
        ("rw,size=8k,huge=advise", "always within_size advise [never] deny force", "advise"),
        ("rw,huge=within_size,size=8k", "always within_size [advise] never deny force", "within_size"),
        ("rw,huge=always", "always within_size advise never [deny] force", "never"),
        ("rw", "always within_size advise never deny [force]", "always"),
        ("rw,huge=advise", None, "never"),
    ],
)
def test_what_a_mount_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, switch: str | None, huge: str
) -> None:
    device = tmp_path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    listed, enabled = tmp_path / "mountinfo", tmp_path / "shmem_enabled"
    listed.write_text(
        "24 27 0:9999 / /dev rw,relatime - devtmpfs devtmpfs rw,huge=always\n"
        rf"25 24 {number} / /mnt/a\040b rw,relatime shared:3 - tmpfs tmpfs {options}" + "\n"
    )
    if switch is not None:
        enabled.write_text(switch + "\n")
    monkeypatch.setattr("services.contract.mount._MOUNTS", listed)
    monkeypatch.setattr("services.contract.mount._SHMEM_ENABLED", enabled)
    found = mount_of(tmp_path)
    assert (found.file_system, found.point, found.huge) == ("tmpfs", Path("/mnt/a b"), huge)
    assert found.allows_huge == (huge != "never")


def test_the_mount_of_a_path() -> None:
    assert mount_of(Path("/dev/shm")).file_system == "tmpfs"
    assert mount_of(Path("/proc")).file_system == "proc"
    assert mount_of(Path("/dev/shm")).free_bytes > FILE_HEADER_BYTES
