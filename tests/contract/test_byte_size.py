from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from services.contract.byte_size import ByteSize, format_bytes, parse_bytes

READ = {
    "4096": 4096,
    " 512 MiB ": 512 * 2**20,
    "2GiB": 2 * 2**30,
    "2gib": 2 * 2**30,
    "1.5 GB": 1_500_000_000,
    "0.1 KiB": 102,
    "3 TB": 3 * 10**12,
    "1TiB": 2**40,
    "7b": 7,
    "9007199254740993": 9007199254740993,  # not a double
}


@pytest.mark.parametrize(("text", "count"), READ.items())
def test_sizes_people_write(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "MiB", "-1", "1e9", "1.GB", ".5GB", "1 PiB", "1GiB2", "nan", "inf", "٣", "9" * 400, 1.5, True, None],
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


@given(st.integers(0, 2**60))
def test_plain_numbers_are_bytes(count: int) -> None:
    assert parse_bytes(count) == parse_bytes(str(count)) == count


@given(st.integers(0, 2**60))
def test_formatted_sizes_are_close_and_readable(count: int) -> None:
    text = format_bytes(count)
    assert "e" not in text.lower().replace("byte", "")
    assert parse_bytes(text.replace(",", "")) == pytest.approx(count, rel=0.006)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1,000 B"), (1023, "1,023 B"), (1024, "1 KiB"), (2**30 - 1, "1 GiB")],
)
def test_formatted_edges(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_a_model_refuses_what_is_no_size() -> None:
    class Model(BaseModel):
        size: ByteSize

    assert Model.model_validate({"size": "1KiB"}).size == 1024
    with pytest.raises(ValidationError, match="is not a size"):
        Model.model_validate({"size": 1.5})
