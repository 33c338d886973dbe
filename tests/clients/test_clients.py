"""Every client gets what plain HTTP gets: models, chats, streams, completions, usage, stops, errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import client, environment, node_path
from tests.clients.process import run
from tests.clients.twin import MAX_TOKENS, MODEL, PROMPT, STOP, Twin, asked, chat, post
from tests.front.real import Service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # the first run installs

PROGRAMS = Path(__file__).parent / "programs"
EVERYONE = {"chat", "finish", "usage", "pieces", "streamed_usage", "stopped", "wrong_model", "tools"}
COMPLETES = {"completion", "completion_pieces"}
EXPLAINS = {"logprobs", "likeliest"}


@dataclass(frozen=True)
class Client:
    """A client, and what more than EVERYONE it offers."""

    name: str
    program: str
    offers: frozenset[str]
    wrong_model: str
    refused: str


CLIENTS = [
    Client(
        "openai",
        "openai_python.py",
        frozenset({"models", "retrieved", *COMPLETES, *EXPLAINS}),
        "NotFoundError",
        "BadRequestError",
    ),
    Client(
        "litellm",
        "litellm_python.py",
        frozenset({"models", "hosted", "at_once", *COMPLETES, *EXPLAINS}),
        "NotFoundError",
        "BadRequestError",
    ),
    Client(
        "langchain",
        "langchain_python.py",
        frozenset({"at_once", *COMPLETES, *EXPLAINS}),
        "OpenAIModelNotFoundError",
        "OpenAIInvalidRequestError",
    ),
    Client(
        "openai_npm",
        "openai_npm.mjs",
        frozenset({"models", "retrieved", "at_once", *COMPLETES, *EXPLAINS}),
        "NotFoundError",
        "BadRequestError",
    ),
    Client(
        "vercel_ai",
        "vercel_ai.mjs",
        frozenset({"at_once", "raw_completion", "raw_completion_pieces"}),
        "AI_APICallError",
        "AI_APICallError",
    ),
]


def seen_by(one: Client, service: Service, home: Path) -> dict[str, Any]:
    program = PROGRAMS / one.program
    order = json.dumps(asked(service.url))
    packages = client(one.name)
    if program.suffix == ".mjs":
        # From standard input a program finds packages where it runs, and needs no copy there.
        variables = environment(home, {"PATH": node_path()})
        said = run(["node", "--input-type=module", "-", order], variables, packages, program.read_text())
    else:
        variables = environment(home, {"LITELLM_LOCAL_MODEL_COST_MAP": "True"})  # no look at the network
        said = run([str(packages / "bin/python"), str(program), order], variables, home)
    seen: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
    return seen


@pytest.mark.parametrize("one", CLIENTS, ids=lambda one: one.name)
def test_a_client_gets_what_plain_http_gets(
    one: Client, service: Service, twin: Twin, tmp_path: Path
) -> None:
    seen = seen_by(one, service, tmp_path)
    assert set(seen) == EVERYONE | one.offers
    assert seen.get("models", [MODEL]) == [MODEL]
    assert seen.get("retrieved", MODEL) == MODEL

    assert seen["chat"] == twin.chat
    assert seen["finish"] == "length"
    assert seen["usage"] == seen["streamed_usage"] == twin.usage
    check_pieces(seen["pieces"], twin.chat)
    assert seen["stopped"] == [twin.chat[: twin.chat.index(STOP)], "stop"]
    assert seen.get("hosted", twin.chat) == twin.chat
    assert set(seen.get("at_once", [twin.chat])) == {twin.chat}

    if "logprobs" in one.offers:
        assert [token for token, _ in seen["logprobs"]] == [token for token, _ in twin.logprobs]
        assert [said for _, said in seen["logprobs"]] == pytest.approx(
            [said for _, said in twin.logprobs], abs=1e-3
        )
        assert "".join(seen["likeliest"]) == twin.chat  # at temperature 0
    if "completion" in one.offers:
        assert seen["completion"] == twin.completion
        check_pieces(seen["completion_pieces"], twin.completion)
    if "raw_completion" in one.offers:
        # It writes the conversation out, and stops where the user's next turn would begin.
        written = f"user:\n{PROMPT}\n\nassistant:\n"
        choice, _ = post(service.url, "/v1/completions", prompt=written, stop=["\nuser:"])
        assert seen["raw_completion"] == choice["text"] != ""
        check_pieces(seen["raw_completion_pieces"], choice["text"])

    kind, status, message = seen["wrong_model"]
    assert (kind, status) == (one.wrong_model, 404)
    assert f"this server serves '{MODEL}'" in message
    kind, status, message = seen["tools"]
    assert (kind, status) == (one.refused, 400)
    assert "tools cannot be called" in message


def check_pieces(pieces: Sequence[str], whole: str) -> None:
    """A stream says what the whole answer says, and comes token by token."""
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > MAX_TOKENS // 2


def test_the_llm_command(service: Service, twin: Twin, tmp_path: Path) -> None:
    known: dict[str, dict[str, Any]] = {
        "hotset": {"model_name": MODEL, "supports_tools": True},
        "hotset-text": {"model_name": MODEL, "completion": True},
        "another": {"model_name": "another"},
    }
    server = {"api_base": f"{service.url}/v1"}
    entries = [{"model_id": name} | server | told for name, told in known.items()]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(entries))  # JSON is YAML
    variables = environment(tmp_path, {"LLM_USER_PATH": str(tmp_path)})
    program = str(client("llm") / "bin/llm")
    greedy = ("-o", "temperature", "0", "-o", "max_tokens", str(MAX_TOKENS))
    question = asked(service.url)["question"]

    def llm(*words: str) -> str:
        return run([program, *words], variables, tmp_path)

    def failure(*words: str) -> str:
        return run([program, *words], variables, tmp_path, status=1)

    assert {"hotset", "hotset-text"} <= {line.split(": ")[-1] for line in llm("models").splitlines()}
    for more in ((), ("--no-stream",)):
        assert llm("-m", "hotset", question, *greedy, *more) == f"{twin.chat}\n"
        [logged] = json.loads(llm("logs", "-n", "1", "--json"))
        assert [logged["input_tokens"], logged["output_tokens"]] == twin.usage[:2]
    goes_on, _ = chat(service.url, question, twin.chat, "And then?")
    assert llm("-c", "And then?", *greedy) == f"{goes_on['message']['content']}\n"
    stopped = llm("-m", "hotset", question, *greedy, "-o", "stop", STOP)
    assert stopped == f"{twin.chat[: twin.chat.index(STOP)]}\n"
    assert llm("-m", "hotset-text", PROMPT, *greedy) == f"{twin.completion}\n"
    assert f"this server serves '{MODEL}'" in failure("-m", "another", "Hi")
    assert "tools cannot be called" in failure("-m", "hotset", "Hi", "--functions", "def look(): return 'x'")
