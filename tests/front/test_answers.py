"""Chat and completions as clients see them, whole and streamed, with openai-python and plain HTTP."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletionMessageParam

from services.decoder.front.sampling import choice_seed
from services.decoder.front.text.tokenizer import TextTokenizer
from tests.front.live import MODEL, LiveFront, chat_body, chunks_of, orders, until

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]
SEED_7_0 = 13280571102735570609
TEXTS = {
    "plain": "Paris is the capital of France.",
    "two, three and four bytes": "né 日本語 🙂🙃 ok",
    "joined emoji": "👩‍👩‍👧 and 🇫🇷!",
    "combining": "e\u0301 a\u0308",
    "spaces and lines": "  two\n\n\tlines \u2028 and more \r\n",
    "JSON": '{"a": [1, "\\"]}',
}


def _streamed_text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in mine)


def test_chat(front: LiveFront) -> None:
    with front.client() as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, extra_body={"cache_salt": orders(say="Bonjour.", cached=7)}
        )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.system_fingerprint
    assert answer.system_fingerprint.startswith("fp_")
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", "Bonjour.")
    usage = answer.usage
    assert usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details
    assert usage.prompt_tokens_details.cached_tokens == 7


def test_the_template_and_nothing_else_makes_the_prompt(front: LiveFront, default_model: Any) -> None:
    body = {"messages": [{"role": "developer", "content": "Be brief."}, *MESSAGES]}
    assert front.chat(max_tokens=1, **body).status_code == 200
    tokenizer = TextTokenizer.from_directory(default_model)
    prompt = tokenizer.decode(front.noted("submit")[-1]["prompt_tokens"], skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    counted = front.post("/tokenize", body).json()
    assert counted["tokens"] == front.noted("submit")[-1]["prompt_tokens"]


@pytest.mark.parametrize("split", [False, True], ids=["tokens", "a token a byte"])
@pytest.mark.parametrize("case", TEXTS)
def test_streams_never_show_half_a_character(front: LiveFront, case: str, split: bool) -> None:
    text = TEXTS[case]
    salt = orders(say=text, split=split)
    chat = front.chat(stream=True, cache_salt=salt)
    assert chat.headers["content-type"].startswith("text/event-stream")
    pieces = chunks_of(chat)
    assert _streamed_text(pieces) == text
    assert all("\ufffd" not in json.dumps(piece, ensure_ascii=False) for piece in pieces)
    assert front.chat(cache_salt=salt).json()["choices"][0]["message"]["content"] == text
    assert _streamed_text(chunks_of(front.complete(stream=True, cache_salt=salt, max_tokens=200))) == text


def test_a_cut_character_ends_as_one_replacement(front: LiveFront) -> None:
    salt = orders(say="a🙂", split=True)
    chunks = chunks_of(front.chat(stream=True, cache_salt=salt, max_tokens=3))
    assert _streamed_text(chunks) == "a\ufffd"
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_the_shape_of_a_chat_stream(front: LiveFront) -> None:
    body = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    chunks = chunks_of(front.chat(cache_salt=orders(say="Hi you"), **body))
    *parts, last = chunks
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    by_choice = defaultdict(list)
    for chunk in parts:
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        by_choice[choice["index"]].append(choice)
    assert set(by_choice) == {0, 1}
    for choices in by_choice.values():
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert choices[-1]["delta"] == {}
        assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert all(set(c["delta"]) == {"content"} for c in choices[1:-1])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 6
    without = chunks_of(front.chat(stream=True, max_tokens=2))
    assert all("usage" not in chunk for chunk in without)


def test_counts_so_far_in_every_chunk(front: LiveFront) -> None:
    counted = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    salt = orders(say="one two three")
    for answer in (front.chat(cache_salt=salt, **counted), front.complete(cache_salt=salt, **counted)):
        chunks = chunks_of(answer)
        usages = [chunk["usage"] for chunk in chunks]
        tokens = [usage["completion_tokens"] for usage in usages]
        with_text = [chunk for chunk in chunks[:-1] if _streamed_text([chunk])]
        assert tokens == sorted(tokens)
        assert [chunk["usage"]["completion_tokens"] for chunk in with_text] == [1, 2, 3]
        assert tokens[-1] == 4  # the end token
        assert {usage["prompt_tokens"] for usage in usages} == {usages[-1]["prompt_tokens"]}
        assert all(
            usage["total_tokens"] == usage["prompt_tokens"] + n
            for usage, n in zip(usages, tokens, strict=True)
        )


def test_openai_python_reads_the_streams(front: LiveFront) -> None:
    salt = {"cache_salt": orders(say="one two three")}
    with front.client() as client:
        with client.chat.completions.stream(model=MODEL, messages=MESSAGES, extra_body=salt) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.content == "one two three"
        parts = client.completions.create(model=MODEL, prompt="x", stream=True, extra_body=salt)
        assert "".join(part.choices[0].text for part in parts) == "one two three"
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize("per_event", [1, 3, 100])
@pytest.mark.parametrize("split", [False, True])
def test_stop_texts_across_chunk_edges(front: LiveFront, per_event: int, split: bool) -> None:
    salt = orders(say="one two €END€ three", split=split, per_event=per_event)
    for stop, kept in [("€END€", ""), (["zzz", "END"], "€"), ([" two €END€ thre"], None)]:
        shown = "one two " + kept if kept is not None else "one"
        for keep in (False, True):
            found = stop if isinstance(stop, str) else stop[-1]
            want = shown + found * keep
            body = {"stop": stop, "cache_salt": salt, "include_stop_str_in_output": keep}
            whole = front.chat(**body).json()
            assert whole["choices"][0]["message"]["content"] == want
            assert whole["choices"][0]["finish_reason"] == "stop"
            chunks = chunks_of(front.chat(stream=True, **body))
            assert _streamed_text(chunks) == want
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stop_text_ends_the_choice_at_the_engine(front: LiveFront) -> None:
    salt = orders(say="a b c d STOP" + " x" * 90, pause=0.01)
    answer = front.chat(n=2, stop="STOP", cache_salt=salt).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["a b c d "] * 2
    request = front.noted("submit")[-1]["request_id"]

    def aborts() -> list[list[int]]:
        return [abort["choices"] for abort in front.noted("abort") if abort["request_id"] == request]

    until(lambda: len(aborts()) >= 2, "the engine to be told")
    assert sorted(aborts()) == [[0], [1]]
    assert answer["usage"]["completion_tokens"] < 30


def test_stop_texts_wait_for_min_tokens(front: LiveFront) -> None:
    salt = orders(say="a.b.c.d.", split=True)
    body = {"stop": ".", "cache_salt": salt}
    assert front.chat(**body).json()["choices"][0]["message"]["content"] == "a"
    assert front.chat(min_tokens=3, **body).json()["choices"][0]["message"]["content"] == "a.b"
    assert front.chat(min_tokens=5, **body).json()["choices"][0]["message"]["content"] == "a.b.c"
    across = {"stop": "b.c", "cache_salt": salt}  # one that begins before them and ends after
    assert front.chat(min_tokens=4, **across).json()["choices"][0]["message"]["content"] == "a."
    assert front.chat(min_tokens=6, **across).json()["choices"][0]["message"]["content"] == "a.b.c.d."


def test_a_text_that_only_looks_like_a_stop_is_shown_in_the_end(front: LiveFront) -> None:
    answer = front.chat(stop="ENDING", cache_salt=orders(say="the END")).json()
    assert answer["choices"][0]["message"]["content"] == "the END"


def test_lengths(front: LiveFront) -> None:
    one = front.chat(max_tokens=1).json()
    assert (one["usage"]["completion_tokens"], one["choices"][0]["finish_reason"]) == (1, "length")
    assert front.chat(max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2
    assert front.chat(max_tokens=2, max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2
    assert front.complete().json()["usage"]["completion_tokens"] == 16
    front.chat(cache_salt=orders(say="x"))
    sent = front.noted("submit")[-1]
    assert sent["max_tokens"] + len(sent["prompt_tokens"]) == 4096


def test_seeds(front: LiveFront) -> None:
    def texts(**fields: Any) -> list[str]:
        choices = front.complete(max_tokens=12, **fields).json()["choices"]
        return [choice["text"] for choice in choices]

    assert texts(seed=7, n=3) == texts(seed=7, n=3)
    assert len(set(texts(seed=7, n=3))) == 3
    assert texts(seed=7, n=3)[:1] == texts(seed=7)
    assert texts(seed=7) != texts(seed=8)
    assert texts(seed=-1) == texts(seed=2**64 - 1)
    assert texts() != texts(), "two requests drew the same seed"
    assert len(set(texts(n=2, prompt=["a"] * 3))) == 6, "choices of one request drew the same seed"
    # A prompt in a list gets what it would get alone.
    assert texts(seed=7, n=2, prompt=["a", "b"]) == texts(seed=7, n=2, prompt="a") + texts(
        seed=7, n=2, prompt="b"
    )


def test_a_choices_seed_never_changes() -> None:
    """The same request to a later version is to get the same answer."""
    assert choice_seed(7, 0) == SEED_7_0
    assert len({choice_seed(seed, index) for seed in range(100) for index in range(100)}) == 10_000


def test_every_sampling_field_reaches_the_engine(front: LiveFront) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "frequency_penalty": -1.5,
        "presence_penalty": 2, "repetition_penalty": 1.5, "logit_bias": {"5": -100, "0": 2.5},
        "max_tokens": 3, "min_tokens": 2, "stop_token_ids": [9, 8, 9], "ignore_eos": True, "priority": 4,
        "seed": 1, "n": 2, "cache_salt": "tenant", "logprobs": True, "top_logprobs": 4,
    }  # fmt: skip
    assert front.chat(**fields).status_code == 200
    sent = front.noted("submit")[-1]
    assert sent["sampling"] == {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "frequency_penalty": -1.5,
        "presence_penalty": 2.0, "repetition_penalty": 1.5, "logit_bias": {"5": -100.0, "0": 2.5},
        "logprobs": True, "top_logprobs": 4,
    }  # fmt: skip
    assert (sent["max_tokens"], sent["min_tokens"], sent["stop_token_ids"]) == (3, 2, [9, 8])
    assert (sent["ignore_eos"], sent["priority"]) == (True, 4)
    assert [choice.get("index", 0) for choice in sent["choices"]] == [0, 1]
    assert front.chat(max_tokens=1, top_k=-1, temperature=0).status_code == 200
    plain = front.noted("submit")[-1]["sampling"]
    assert plain == {"top_p": 1.0, "repetition_penalty": 1.0}


def test_many_prompts_answer_in_order(front: LiveFront) -> None:
    answer = front.complete(prompt=["one", "two", "three"], n=2, echo=True, max_tokens=1).json()
    texts = [choice["text"][:-1] for choice in answer["choices"]]
    assert texts == ["one", "one", "two", "two", "three", "three"]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    tokens = front.complete(prompt=[[504], [28, 216]], echo=True, max_tokens=1).json()
    assert answer["usage"]["prompt_tokens"] == 3, "a prompt counts once, however many answers it gets"
    assert tokens["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone(front: LiveFront, stream: bool) -> None:
    response = front.complete(prompt="Hello there", echo=True, max_tokens=0, stream=stream)
    if stream:
        assert _streamed_text(chunks_of(response)) == "Hello there"
    else:
        answer = response.json()
        assert answer["choices"][0]["text"] == "Hello there"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0


def test_tokenize_and_back(front: LiveFront) -> None:
    told = front.post("/tokenize", {"prompt": "Hé 𓀀", "return_token_strs": True}).json()
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == 4096
    assert any(text.startswith("bytes:\\x") for text in told["token_strs"])
    assert front.post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "Hé 𓀀"}
    assert front.post("/detokenize", {"tokens": [1]}).json() == {"prompt": "<|im_start|>"}
    assert front.post("/detokenize", {"tokens": [49152]}).status_code == 400
    assert front.post("/tokenize", {"prompt": "x", "messages": MESSAGES}).status_code == 400
    assert front.post("/tokenize", {"prompt": "x", "model": "other"}).status_code == 404
    assert front.post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_an_error_within_a_stream_is_an_event(front: LiveFront) -> None:
    response = front.post("/v1/chat/completions", chat_body(stream=True, cache_salt=orders(error_after=2)))
    assert response.status_code == 200
    *_, last = [line for line in response.text.split("\n\n") if line]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == "engine_error"
    assert "as ordered" in error["message"]
    assert "[DONE]" not in response.text
    with front.client() as client, pytest.raises(Exception, match="as ordered"):
        for _ in client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, extra_body={"cache_salt": orders(error_after=1)}
        ):
            pass


def test_one_log_line_a_request(front: LiveFront) -> None:
    headers = {"x-request-id": "counted-1"}
    body = chat_body(n=2, max_tokens=3)
    httpx.post(f"{front.url}/v1/chat/completions", json=body, headers=headers).raise_for_status()
    (line,) = front.logged("id=counted-1 ")
    for part in (
        "status=200",
        "prompt_tokens=31",
        "completion_tokens=6",
        "finish=length,length",
        "seconds=",
    ):
        assert part in line
