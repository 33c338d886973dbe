"""The recorder's file: what an engine chose is what is read back, whatever happened to the file."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks.eviction import POLICIES, misses
from benchmarks.selection_stream import recorded
from services.contract.errors import SetupError
from services.decoder.attention.selection_file import (
    FileHeader,
    Frame,
    SelectionWriter,
    read_frames,
    read_header,
)
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.engine.settings import EngineSettings
from services.decoder.kernels.counter import Counter
from services.decoder.models.causal_lm import CausalLM
from services.decoder.models.spec import ModelSpec
from services.decoder.settings import DecoderSettings
from tests.decoder import checkpoints, dsa_rig

pytestmark = pytest.mark.usefixtures("one_thread")

HEADER = FileHeader(layers=2, groups=2, block_tokens=16)


def write(writer: SelectionWriter, layer: int, position: int, first: int) -> NDArray[np.int32]:
    blocks = np.array([[[first, 2, -1], [0, -1, -1]], [[1, 0, 3], [3, 1, 0]]], np.int32)
    writer.write(layer, np.array([0, 5]), np.array([position, 7]), blocks)
    return blocks


@pytest.mark.parametrize("position", [9, 65_534, 65_535, 2_000_000])
def test_what_was_written_is_read(tmp_path: Path, position: int) -> None:
    path = tmp_path / "made.sel"
    writer = SelectionWriter(path, HEADER)
    written = [write(writer, layer, position + step, step) for step in range(3) for layer in (0, 1)]
    assert read_header(path) == HEADER
    frames = list(read_frames(path))
    assert [(frame.step, frame.layer) for frame in frames] == [
        (step, layer) for step in range(3) for layer in (0, 1)
    ]
    for number, frame in enumerate(frames):
        assert frame.rows.tolist() == [0, 5]
        assert frame.positions.tolist() == [position + number // 2, 7]
        assert np.array_equal(frame.blocks, written[number])


def test_a_file_cut_short_loses_its_last_frame_only(tmp_path: Path) -> None:
    path = tmp_path / "cut.sel"
    writer = SelectionWriter(path, HEADER)
    for step in range(3):
        write(writer, 0, 9 + step, 0)
    whole = path.read_bytes()
    for lost in (1, 23, 30, 50):
        path.write_bytes(whole[:-lost])
        assert [frame.step for frame in read_frames(path)] == [0, 1]


@pytest.mark.parametrize("found", [b"", b"HOTSEL", b"HOTSEL00" + bytes(12), b"{}" * 20])
def test_another_file_is_refused(tmp_path: Path, found: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(found)
    with pytest.raises(ValueError, match="is no file of selections"):
        list(read_frames(path))


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, limit = tmp_path / "full.sel", resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = SelectionWriter(path, HEADER)
    write(writer, 0, 9, 0)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limit[1]))
    try:
        write(writer, 0, 10, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    write(writer, 0, 11, 0)
    assert [frame.step for frame in read_frames(path)] == [0]
    [line] = caplog.messages
    assert line.startswith("selections_no_longer_recorded")


def test_sequences_of_one_row_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "rows.sel"
    writer = SelectionWriter(path, FileHeader(1, 1, 16))
    for position in (40, 41, 42, 20, 21):
        blocks = np.array([[[0, position % 3, 0, -1]]], np.int32)
        writer.write(0, np.array([3]), np.array([position]), blocks)
    found = {lane.first: stream for lane, stream in recorded(path, 16)}
    assert [each.tolist() for each in found[40].chosen] == [[0, 1], [0, 2], [0]]
    assert found[40].opened.tolist() == [2, 2, 2]
    assert [each.tolist() for each in found[20].chosen] == [[0, 2], [0]]


def settings(**changes: object) -> DecoderSettings:
    base: dict[str, object] = {"model": "unused", "device": "cpu", "block_tokens": 2, "budget_tokens": 16}
    return DecoderSettings.model_validate(
        base | {"hot_tokens": 18, "max_rows": 2, "max_step_tokens": 64} | changes
    )


def test_an_engine_notes_what_it_chose(tmp_path: Path) -> None:
    """By group and layer; replayed as LRU it misses what the engine counted."""
    checkpoint = checkpoints.save(tmp_path / "model", "llama")
    model = CausalLM(ModelSpec.read(checkpoint), torch.float32, torch.device("cpu"))
    path = tmp_path / "noted.sel"
    engine = OfflineEngine(settings(record_selections=path, max_rows=1), 2**25, model)
    asked = Sequence("one", 0, dsa_rig.prompt_of(91), Sampling(), 0, 30)
    engine.generate([asked])
    assert read_header(path) == FileHeader(3, 2, 2)
    frames: list[Frame] = list(read_frames(path))
    assert [frame.positions.tolist() for frame in frames[::3]] == [[91 + step] for step in range(29)]
    assert {frame.blocks.shape for frame in frames} == {(1, 2, 8)}
    counters = engine.counters()
    for layer in range(3):
        streams = [stream for lane, stream in recorded(path, 2) if lane.layer == layer]
        assert len(streams) == 2
        assert sum(int(stream.sizes.sum()) for stream in streams) == counters[layer, Counter.CHOSEN]
        # Both begin with the open block and nothing else.
        assert (
            sum(int(misses(stream, POLICIES["lru"], 9).sum()) for stream in streams)
            == counters[layer, Counter.MISSES]
        )


def test_each_engine_has_its_own_file(tmp_path: Path) -> None:
    said = {"model": "unused", "engine_socket": "unused", "record_selections": tmp_path / "x.sel"}
    files = [
        EngineSettings.model_validate(said | {"engine_index": index}).selections_file for index in (0, 1)
    ]
    assert files == [tmp_path / "x.sel", tmp_path / "x.sel.1"]


def test_only_layers_that_choose_are_noted(tmp_path: Path) -> None:
    case = dsa_rig.CASES["glm shared"]
    checkpoint = checkpoints.save(tmp_path / "model", case.model_type, **case.changes)
    path = tmp_path / "noted.sel"
    engine = dsa_rig.engine_of(checkpoint, record_selections=path, max_rows=2)
    engine.generate([dsa_rig.ask(str(i), dsa_rig.prompt_of(40, i), 8) for i in range(2)])
    frames = list(read_frames(path))
    assert {frame.layer for frame in frames} == {0, 1, 4}
    assert max(len(frame.rows) for frame in frames) == 2


def test_a_file_that_cannot_be_made_is_a_clear_refusal(tmp_path: Path) -> None:
    checkpoint = checkpoints.save(tmp_path / "model", "llama")
    with pytest.raises(SetupError, match=r"--record-selections .*: No such file or directory"):
        OfflineEngine(settings(model=checkpoint, record_selections=tmp_path / "none" / "x"), 2**25)
