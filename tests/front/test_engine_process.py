"""The end of an engine's process, and of whoever waits for it."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

from services.decoder.front.engine_process import EngineProcess

ENDS = [sys.executable, "-c", "print('error: it broke')\nprint('and why')"]
STAYS = [sys.executable, "-c", "import signal\nsignal.pause()"]


def test_its_status_and_its_last_words() -> None:
    async def run() -> None:
        process = await EngineProcess.start(ENDS)
        assert await process.wait() == 0
        assert process.last_error() == "it broke\nand why"
        await process.stop()

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(8))
def test_who_is_cancelled_as_it_ends_is_cancelled(turns: int) -> None:
    """The news of its end and the cancellation may come in one turn of the loop; neither is lost."""

    async def run() -> None:
        process = await EngineProcess.start(STAYS)
        stopping = asyncio.create_task(process.stop())
        ended = asyncio.create_task(process.wait())
        async with asyncio.timeout(60):
            while not ended.done() and process._process.returncode is None:
                await asyncio.sleep(0)
            for _ in range(turns):
                await asyncio.sleep(0)
            if not stopping.cancel():
                assert await ended == -signal.SIGTERM
                return
            with pytest.raises(asyncio.CancelledError):
                await stopping
            await process.stop()
            assert await ended == -signal.SIGTERM

    asyncio.run(run())
