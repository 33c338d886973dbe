"""What selectors chose, on file: written by an engine that is asked to, read by whoever replays it.

Knows the bytes, which docs/selections.md describes; no selector and no policy.
"""

from __future__ import annotations

import logging
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger(__name__)

MAGIC = b"HOTSEL01"
_HEADER = struct.Struct("<8s3I")
_FRAME = struct.Struct("<IHHII")
_SMALL = 0xFFFF  # "none" of ids in two bytes, and so one more than the largest of them


class FileHeader(NamedTuple):
    """What holds for the whole file."""

    layers: int
    groups: int
    block_tokens: int


class Frame(NamedTuple):
    """One layer of one step."""

    step: int
    layer: int
    rows: NDArray[np.uint32]  # [R]
    positions: NDArray[np.uint32]  # [R], of the newest token
    blocks: NDArray[np.int64]  # [R, groups, top_k] in the order of the choice, -1 = none


class SelectionWriter:
    """One engine's file. One thread calls it.

    A frame is written at once and whole, so that a killed engine leaves what it recorded. Serving does not
    depend on it: when the disk is full, it says so once and writes no more.
    """

    def __init__(self, path: Path, header: FileHeader) -> None:
        """Begin the file, anew if there is one.

        Raises:
            OSError: it cannot be made.
        """
        self._path = path
        self._file: IO[bytes] | None = path.open("wb", buffering=0)
        weakref.finalize(self, self._file.close)
        self._file.write(_HEADER.pack(MAGIC, *header))
        self._step, self._layer = 0, -1

    def write(
        self,
        layer: int,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        blocks: NDArray[np.int32],
    ) -> None:
        """Add a layer's choice; layers come in order, and the first one that comes again begins a step.

        Args:
            layer: which layer.
            rows: [R].
            positions: [R], of the newest tokens.
            blocks: [R, groups, top_k], -1 = none.
        """
        if self._file is None:
            return
        self._step += layer <= self._layer
        self._layer = layer
        small = int(positions.max(initial=0)) < _SMALL  # no block's number is larger than a position
        kind = np.dtype("<u2" if small else "<u4")
        head = _FRAME.pack(self._step, layer, len(rows), blocks.shape[2], kind.itemsize)
        places = np.stack([rows, positions], axis=1).astype("<u4")
        frame = head + places.tobytes() + blocks.astype(kind).tobytes()  # -1 becomes all ones
        try:
            if self._file.write(frame) == len(frame):
                return
            reason = "the disk is full"
        except OSError as error:
            reason = str(error)
        _log.warning("selections_no_longer_recorded path=%s reason=%r", self._path, reason)
        self._file.close()
        self._file = None


def read_header(path: Path) -> FileHeader:
    """What a file holds.

    Raises:
        ValueError: it is no file of selections.
    """
    with path.open("rb") as file:
        return _header(path, file)


def read_frames(path: Path) -> Iterator[Frame]:
    """The frames in order; one that was not written to its end, at the file's end, is left out.

    Raises:
        ValueError: it is no file of selections.
    """
    with path.open("rb") as file:
        groups = _header(path, file).groups
        while len(head := file.read(_FRAME.size)) == _FRAME.size:
            step, layer, rows, width, size = _FRAME.unpack(head)
            if size not in (2, 4):
                raise ValueError(f"{path}: a frame of step {step} has ids of {size} bytes")
            places = file.read(8 * rows)
            body = file.read(rows * groups * width * size)
            if len(places) + len(body) < 8 * rows + rows * groups * width * size:
                return
            row, position = np.frombuffer(places, "<u4").reshape(rows, 2).T
            ids = np.frombuffer(body, f"<u{size}")
            blocks = np.where(ids == (1 << 8 * size) - 1, -1, ids.astype(np.int64))
            yield Frame(step, layer, row, position, blocks.reshape(rows, groups, width))


def _header(path: Path, file: IO[bytes]) -> FileHeader:
    head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(MAGIC):
        raise ValueError(f"{path} is no file of selections: it does not begin with {MAGIC.decode()}")
    _, *numbers = _HEADER.unpack(head)
    return FileHeader(*numbers)
