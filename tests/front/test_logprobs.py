"""Log probabilities say the same as the text they come with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hotset.v1 import engine_pb2

from services.decoder.front.answer import ChoicePiece
from services.decoder.front.choice_text import Piece
from services.decoder.front.completion_shape import CompletionShape
from services.decoder.front.text.tokenizer import TextTokenizer
from tests.front.live import LiveFront, chunks_of, orders
from tests.front.text.families import write_family

SPLIT = orders(say="né 🙂 ok", split=True)


def _bytes(entries: list[dict[str, Any]]) -> bytes:
    return b"".join(bytes(entry["bytes"]) for entry in entries)


def test_chat_logprobs_spell_the_answer(front: LiveFront) -> None:
    choice = front.chat(logprobs=True, top_logprobs=2, cache_salt=SPLIT).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert _bytes(content).decode() == choice["message"]["content"] == "né 🙂 ok"
    assert content[1]["token"] == "bytes:\\xc3"
    for entry in content:
        assert entry["logprob"] == -0.5
        assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, -9999.0]
        assert entry["top_logprobs"][0]["token"] == entry["token"]
    alone = front.chat(logprobs=True, cache_salt=SPLIT).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in alone)


@pytest.mark.parametrize("per_event", [1, 2, 5, 50])
@pytest.mark.parametrize("stop", [None, "🙂", "\u00e9 🙂 o", " ok"])
def test_each_chunk_carries_the_tokens_of_its_text(
    front: LiveFront, per_event: int, stop: str | None
) -> None:
    salt = orders(say="né 🙂 ok", split=True, per_event=per_event)
    body = {"logprobs": True, "stop": stop, "cache_salt": salt}
    chunks = chunks_of(front.chat(stream=True, **body))
    told = 0
    for chunk in chunks:
        choice = chunk["choices"][0]
        if not choice["delta"].get("content"):
            assert choice["logprobs"] is None
            continue
        content = choice["logprobs"]["content"]
        assert _bytes(content).decode() == choice["delta"]["content"]
        told += len(content)
    whole = front.chat(**body).json()["choices"][0]
    text = "né 🙂 ok".split(stop)[0] if stop else "né 🙂 ok"
    assert whole["message"]["content"] == text
    assert _bytes(whole["logprobs"]["content"]).decode() == text
    assert told == len(whole["logprobs"]["content"])


def test_a_token_that_a_stop_text_cuts_is_told(front: LiveFront) -> None:
    # "capital" is one token; the stop text begins inside it.
    salt = orders(say="The capital")
    choice = front.chat(logprobs=True, stop="tal", cache_salt=salt).json()["choices"][0]
    assert choice["message"]["content"] == "The capi"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["The", " capital"]


def test_completion_logprobs(front: LiveFront) -> None:
    salt = orders(say="né ok")
    choice = front.complete(logprobs=1, cache_salt=salt).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == "né ok"
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    assert logprobs["token_logprobs"] == [-0.5] * len(logprobs["tokens"])
    assert all(token in top for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    none = front.complete(logprobs=0, cache_salt=salt).json()["choices"][0]["logprobs"]
    assert [list(top) for top in none["top_logprobs"]] == [[token] for token in none["tokens"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [0, 3])
def test_echo_tells_the_prompts_too(front: LiveFront, most: int, stream: bool) -> None:
    response = front.complete(
        prompt="The capital of France", echo=True, logprobs=1, max_tokens=most, stream=stream
    )
    if stream:
        choices = [chunk["choices"][0] for chunk in chunks_of(response)]
        text = "".join(choice["text"] for choice in choices)
        logprobs = {
            key: [item for choice in choices for item in choice["logprobs"][key]]
            for key in choices[0]["logprobs"]
        }
    else:
        text = response.json()["choices"][0]["text"]
        logprobs = response.json()["choices"][0]["logprobs"]
    assert text.startswith("The capital of France")
    assert "".join(logprobs["tokens"]) == text
    assert logprobs["token_logprobs"] == [None, *[-0.5] * (3 + most)]
    assert logprobs["top_logprobs"][0] is None
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert text[offset:].startswith(token)


@pytest.mark.parametrize("written", ["a b", "<s>a b"])
def test_an_added_begin_token_takes_up_none_of_the_echo(written: str, tmp_path: Path) -> None:
    tokenizer = TextTokenizer.from_directory(write_family("llama2", tmp_path))
    ids = tokenizer.encode(written)
    begins = [token for token in ids if token == ids[0]]
    assert len(begins) == 1 + written.startswith("<s>")
    shape = CompletionShape(
        answer_id="",
        created=0,
        model="",
        fingerprint="",
        tokenizer=tokenizer,
        n=1,
        top_logprobs=0,
        echoed=[written],
    )
    prompt = [engine_pb2.Token(id=token) for token in ids]
    (chunk,) = shape.chunks(ChoicePiece(0, Piece(), prompt))
    logprobs = chunk.choices[0].logprobs
    assert logprobs is not None
    starts = {"a b": [0, 0, 0, 1], "<s>a b": [0, 3, 3, 4]}
    assert logprobs.text_offset[: len(begins) + 1] == starts[written][: len(begins) + 1]
    assert logprobs.text_offset[-1] < len(written)


def test_echo_with_too_many_logprobs_is_refused(front: LiveFront) -> None:
    body: dict[str, Any] = {"prompt": [5] * 4000, "echo": True, "max_tokens": 0, "n": 8}
    assert front.complete(logprobs=20, **body).json()["error"]["param"] == "logprobs"
    assert front.complete(logprobs=1, **body).status_code == 200
