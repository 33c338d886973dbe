"""A store, an engine that cannot map its arena, and what an engine that can says to the same prompts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from services.contract.file_header import read_file_header
from services.contract.layout import FILE_HEADER_BYTES
from services.decoder.engine.host_pages import HostPage
from services.decoder.engine.offline import OfflineEngine
from services.decoder.engine.sequence import Sampling
from services.decoder.engine.sequence import Sequence as Row
from services.decoder.engine.store_session import StoreSession
from services.decoder.settings import DecoderSettings
from tests.engine.processes import FLAGS, PATIENCE_SECONDS, Engine, Keeper, KvStore, eventually

IN_TIME = 60.0  # of an error that is due after two seconds: the machine may be busy
ARENA_BYTES = 16 * 2**20
TRANSPORTS: dict[str, tuple[str, ...]] = {
    "mapped": (),  # for comparison
    "tcp": ("--data-transport=tcp",),
    "ucx-shm": ("--data-transport=ucx", "--ucx-tls=sm,self", "--ucx-lanes=shm"),
    "ucx-tcp": ("--data-transport=ucx", "--ucx-tls=tcp,self", "--ucx-lanes=tcp"),
}
SMALL: dict[str, object] = {**FLAGS, "block_tokens": 4, "budget_tokens": 32, "hot_tokens": 36}
"""Hot slots for one block more than the budget: much is missed."""


def prompt(number: int, length: int = 300) -> list[int]:
    return [3 + (7 * i * i + number * i) % 200 for i in range(length)]


def answers(model: Path, tokens: Sequence[int], **changes: object) -> list[list[int]]:
    """What an engine that maps its arena says to prompts 0, 1, 2 ..., each alone: so many tokens."""
    flags = {"model": model, **SMALL, "prefix_cache": False, **changes}
    engine = OfflineEngine(DecoderSettings.model_validate(flags), ARENA_BYTES)
    told = []
    for number, count in enumerate(tokens):
        sequence = Row("r", 0, prompt(number), Sampling(), seed=1, max_tokens=count)
        engine.generate([sequence])
        told.append(sequence.generated)
    return told


def remote(flags: Sequence[str]) -> dict[str, object]:
    """What an engine must be told beside a store with these flags."""
    ucx = (flag.removeprefix("--").split("=") for flag in flags if flag.startswith("--ucx"))
    access = "remote" if flags else "mapped"
    return {"store_access": access, "port": 0, **{name.replace("-", "_"): value for name, value in ucx}}


class Crowd:
    """Another client of a store, which takes pages from under everybody's nose and gives them back."""

    def __init__(self, store: KvStore) -> None:
        """An engine has attached before."""
        with store.arena.open("rb") as file:
            header = read_file_header(memoryview(file.read(FILE_HEADER_BYTES)))
        assert header is not None
        self._session = StoreSession(store.address, "crowd")
        self._session.attach(header.fingerprint, header.page_tokens, header.planes, PATIENCE_SECONDS)
        self._taken: list[HostPage] = []

    def take(self, leave: int = 0) -> None:
        """All pages that nobody holds, but so many."""
        self._session.match([])
        while (more := self._session.free - leave) > 0:
            self._taken += self._session.exchange([], more) or ()

    def give_back(self) -> None:
        taken, self._taken = self._taken, []
        self._session.exchange(taken, 0)

    def close(self) -> None:
        self._session.close()


class Rig:
    """Of one transport; the store can be started anew while the engine lives."""

    def __init__(
        self,
        keep: Keeper,
        shm: Path,
        model: Path,
        expected: list[list[int]],
        transport: str,
        *,
        store_flags: Sequence[str] = (),
        listen: str = "127.0.0.1:0",
        before: Sequence[str] = (),
        engine_kind: type[Engine] = Engine,
        **flags: object,
    ) -> None:
        """`store_flags`, `listen` and `before` say where the store is; by default beside the engine."""
        self._keep, self._directory = keep, shm / "store"
        self._flags, self._before = store_flags or TRANSPORTS[transport], before
        self.expected = expected
        self.store = keep(
            KvStore(self._directory, ARENA_BYTES, listen=listen, flags=self._flags, before=before)
        )
        more = {**SMALL, **remote(self._flags), **flags}
        self.engine = keep(engine_kind(shm / "e.sock", model, self.store.address, **more))
        self.engine.wait_ready()
        self._asked = 0

    def ask(self, number: int) -> str:
        """Send a prompt; its name."""
        self._asked += 1
        name = f"{number}-{self._asked}"
        self.engine.submit(name, prompt(number), len(self.expected[number]))
        return name

    def outcome(self, name: str) -> str:
        """Wait for the end; "" if all is right, else the error, and what was told before is right."""
        told = self.engine.answer(name)
        end = self.engine.finished(name)
        assert end is not None
        expected = self.expected[int(name.partition("-")[0])]
        assert told == expected[: len(told)]
        assert end.error or told == expected
        return end.error

    def says(self, number: int) -> str:
        """The outcome of a prompt, after which nothing is held."""
        outcome = self.outcome(self.ask(number))
        eventually("everything is back", self.engine.idle)
        return outcome

    def struck(self, number: int, strike: Callable[[], object]) -> None:
        """Have something befall the store in mid-answer: a clear error in time, and right tokens before."""
        name = self.begun(number)
        strike()
        ended, began = self.engine.finished(name) is not None, time.monotonic()
        error = self.outcome(name)
        assert time.monotonic() - began < IN_TIME
        if not ended:
            assert "store" in error
            assert "send the request again" in error

    def begun(self, number: int, tokens: int = 5) -> str:
        """Ask, and wait until it is in mid-answer; its name."""
        name = self.ask(number)
        eventually("it is in mid-answer", lambda: len(self.engine.tokens(name)) >= tokens)
        return name

    def start_again(self, *, anew: bool = False) -> None:
        """Kill the store and start it again, with its arena or with an empty one."""
        address = self.store.address
        self.store.clear_away()
        if anew:
            shutil.rmtree(self._directory)
        self.store = self._keep(
            KvStore(self._directory, ARENA_BYTES, listen=address, flags=self._flags, before=self._before)
        )

    def waits(self, seconds: float = 0.5) -> None:
        """Wait until the engine has nothing but one that waits, and see that it stays so."""

        def waiting() -> bool:
            now = self.engine.stats()
            return now.requests_waiting == 1 and not now.requests_running

        eventually("it waits", waiting)
        time.sleep(seconds)
        assert waiting()

    def unlink(self) -> None:
        """Take the store's arena away; it ends, and says why."""
        self.store.arena.unlink()
        self.store_gives_up()

    def store_gives_up(self) -> None:
        """Wait until it has."""
        assert self.store.wait() == 2
        assert "was removed while kvstore ran; start it again" in self.store.text

    def until_right(self, number: int) -> None:
        """Ask again and again until the answer is right: no restart of anything is needed."""
        eventually("it answers again", lambda: not self.says(number))

    def store_rests(self) -> Callable[[], bool]:
        """Whether the store holds nothing for anybody."""
        return lambda: self.store.stats().open_pages == self.store.stats().sealed_pages == 0
