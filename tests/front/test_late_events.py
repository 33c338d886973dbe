"""Events of an engine that is known to be dead reach no answer, whatever comes when."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hotset.v1 import engine_pb2
from prometheus_client import CollectorRegistry

from services.contract.errors import Unavailable
from services.decoder.front.answer import Answer, ChoicePiece, Tally
from services.decoder.front.engine_client import Arrival, EngineClient, EngineGone, Mailbox
from services.decoder.front.engines import Engines
from services.decoder.front.request_metrics import RequestMetrics
from services.decoder.front.sampling import LogprobsWanted, Plan
from services.decoder.front.text.tokenizer import TextTokenizer


class _Life(EngineClient):
    """An engine that answers what a test puts into its mailbox."""

    def __init__(self, directory: Path, *, dies_at_submission: bool = False) -> None:
        super().__init__(directory / "nobody.sock")
        self.submitted: list[engine_pb2.SubmitRequest] = []
        self.mailbox: Mailbox = asyncio.Queue()
        self._dies = dies_at_submission

    async def submit(self, request: engine_pb2.SubmitRequest, mailbox: Mailbox) -> None:
        self.submitted.append(request)
        self.mailbox = mailbox
        if self._dies:
            await self.close()
            raise Unavailable("it died")

    def tell(self, *tokens: int, end: bool = False) -> None:
        finish = engine_pb2.FINISH_REASON_LENGTH if end else engine_pb2.FINISH_REASON_UNSPECIFIED
        event = engine_pb2.TokenEvent(
            request_id="a-0", tokens=[engine_pb2.Token(id=token) for token in tokens], finish_reason=finish
        )
        self.mailbox.put_nowait(Arrival("a-0", event))

    def die(self) -> None:
        self.mailbox.put_nowait(EngineGone())


class _Lives(Engines):
    """Hands out one life after another."""

    def __init__(self, directory: Path, lives: list[_Life]) -> None:
        super().__init__(lambda index, socket: [str(socket)], directory, 1)
        self._lives = lives

    async def next_life(self) -> EngineClient:
        return self._lives.pop(0)


PLAN = Plan(
    sampling=engine_pb2.SamplingParams(),
    logprobs=LogprobsWanted(answer=True),
    n=1,
    seed=1,
    most_tokens=5,
    min_tokens=0,
    stop_texts=(),
    keep_stop_text=False,
    stop_token_ids=(),
    ignore_eos=True,
    priority=0,
    cache_salt=b"",
)


@pytest.mark.parametrize("dies_again", [False, True], ids=["once", "and again while it takes the request"])
def test_no_token_twice_and_none_of_the_dead(default_model: Path, tmp_path: Path, dies_again: bool) -> None:
    tokenizer = TextTokenizer.from_directory(default_model)

    async def run() -> None:
        first, last = _Life(tmp_path), _Life(tmp_path)
        between = [_Life(tmp_path, dies_at_submission=True)] if dies_again else []
        answer = Answer(
            first,
            _Lives(tmp_path, [*between, last]),
            tokenizer,
            RequestMetrics(CollectorRegistry()),
            endpoint="chat",
            tally=Tally(),
            began=0.0,
            restart_seconds=5,
        )
        await answer.submit("a", [[1, 2, 3]], PLAN, limit=100, continues=True)
        first.tell(40, 41)
        first.die()
        first.tell(99, end=True)  # it was on its way
        first.die()

        async def gather() -> list[ChoicePiece]:
            return [piece async for piece in answer.pieces()]

        gathering = asyncio.get_running_loop().create_task(gather())
        while not last.submitted:
            await asyncio.sleep(0.001)
            assert not gathering.done(), gathering.exception()
        (again,) = last.submitted
        assert [list(choice.generated_tokens) for choice in again.choices] == [[40, 41]]
        first.tell(98)
        last.tell(42)
        first.tell(97, end=True)
        last.tell(43, 44, end=True)
        async with asyncio.timeout(60):
            pieces = await gathering
        assert [token.token.id for piece in pieces for token in piece.piece.tokens] == [40, 41, 42, 43, 44]
        assert answer.tally.completion_tokens == 5
        assert answer.tally.finishes == ["length"]
        for life in (first, last):
            await life.close()

    asyncio.run(run())
