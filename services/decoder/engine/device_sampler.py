"""Sampling on the device: what sampler.py defines, for all rows of a step in one launch.

Keeps, by row of the tables, what its sequence wishes and which tokens it has had; the host knows the former,
the device alone counts the latter. Knows sequences and tensors, no model and no graph.

    sampler.seat(sequence)                        when a sequence has got its row and begins to be sampled
    greedy = sampler.prepare(sequences)           once a step: one small copy to the device
    tokens = sampler.draw(logits, greedy=greedy)  on the device, -1 = no number to choose by; can be captured
    sampler.logprobs(logits, tokens, top)         after it, for those who asked
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from services.contract.errors import InvalidRequest
from services.decoder.engine.sequence import Sampling, Sequence
from services.decoder.kernels.sample import SampleInputs, SampleTables, Wish, sample
from services.decoder.kernels.sample_limits import MOST_BARRED, MOST_BIASED

if TYPE_CHECKING:  # needs the gpu extra
    from services.decoder.kernels.gpu.sample import SampleShape

_STAGES = 4  # host buffers in turn: a step may be prepared while earlier ones are still under way


class DeviceSampler:
    """One engine's; one thread calls it. Everything happens on torch's current stream."""

    def __init__(self, rows: int, vocab: int, device: torch.device, logits_scale: float = 1.0) -> None:
        """Allocate all there will ever be.

        Args:
            rows: of the tables; also the most rows of a batch.
            vocab: logits of a row.
            device: a GPU, or the CPU, where the twin runs.
            logits_scale: factor on the logits.
        """
        self.tables = SampleTables.empty(rows, vocab, device)
        self.tokens = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._rows, self._vocab, self._device, self._scale = rows, vocab, device, logits_scale
        self._on_gpu = device.type == "cuda"
        # Four numbers a row, then the number of real rows.
        self._inputs = torch.zeros(4 * rows + 1, dtype=torch.int32, device=device)
        self._staged = [
            torch.zeros(4 * rows + 1, dtype=torch.int32, pin_memory=self._on_gpu) for _ in range(_STAGES)
        ]
        self._copied = [_event() for _ in self._staged] if self._on_gpu else []
        self._stage = 0
        self._keys: Tensor | None = None  # where a row's keys exceed shared memory
        self._variants: dict[tuple[torch.dtype, bool], tuple[SampleShape, ...]] = {}
        self._shapes: dict[tuple[torch.dtype, torch.Size, tuple[int, ...], bool], SampleShape] = {}

    @staticmethod
    def device_bytes(rows: int, vocab: int) -> int:
        """What the tables take, for the memory plan."""
        return rows * SampleTables.row_bytes(vocab)

    @staticmethod
    def check(sampling: Sampling, stop_ids: frozenset[int]) -> None:
        """Refuse what the tables have no room for.

        Raises:
            InvalidRequest: too many biased or stop tokens, or a token biased twice.
        """
        biased = [token for token, _ in sampling.logit_bias]
        if len(biased) > MOST_BIASED:
            raise InvalidRequest(
                f"logit_bias names {len(biased)} tokens; at most {MOST_BIASED} can be biased"
            )
        if len(set(biased)) < len(biased):
            raise InvalidRequest("logit_bias names a token twice")
        if len(stop_ids) > MOST_BARRED:
            raise InvalidRequest(
                f"a request has {len(stop_ids)} stop tokens; at most {MOST_BARRED} are possible"
            )

    def seat(self, sequence: Sequence) -> None:
        """Take in a sequence that has got a row, with the tokens it has already, before its first draw.

        Steps launched before may still run; those launched after see the new sequence.

        Raises:
            InvalidRequest: as `check` says.
        """
        wish, row, tables = sequence.sampling, _row(sequence), self.tables
        self.check(wish, sequence.stop_ids)
        penalised = _penalised(wish)
        stops = sequence.stop_ids if sequence.min_tokens else frozenset[int]()
        columns = {
            Wish.TEMPERATURE: wish.temperature,
            Wish.TOP_P: wish.top_p,
            Wish.MIN_P: wish.min_p,
            Wish.TOP_K: wish.top_k,
            Wish.REPETITION: wish.repetition_penalty,
            Wish.FREQUENCY: wish.frequency_penalty,
            Wish.PRESENCE: wish.presence_penalty,
            Wish.PENALISED: penalised,
            Wish.BIASED: len(wish.logit_bias),
            Wish.STOPS: len(stops),
        }
        numbers = [float(columns[column]) for column in Wish]
        tables.wishes[row] = self._sent(torch.tensor(numbers, dtype=torch.float64))
        seed = sequence.seed - 2**64 if sequence.seed >= 2**63 else sequence.seed
        tables.seeds[row] = self._sent(torch.tensor(seed))
        if wish.logit_bias:
            ids, values = zip(*wish.logit_bias, strict=True)
            tables.bias_ids[row, : len(ids)] = self._sent(torch.tensor(ids, dtype=torch.int32))
            tables.biases[row, : len(ids)] = self._sent(torch.tensor(values, dtype=torch.float32))
        if stops:
            tables.stop_ids[row, : len(stops)] = self._sent(torch.tensor([*stops], dtype=torch.int32))
        if penalised:
            count = tables.counts[row].zero_()
            count.index_fill_(0, self._sent(torch.from_numpy(np.asarray(sequence.prompt, np.int64))), 1)
            if sequence.generated:
                said = self._sent(torch.tensor(sequence.generated))
                count.index_add_(0, said, torch.full_like(said, 2, dtype=torch.int32))

    def prepare(self, sequences: list[Sequence], late: Iterable[int] | None = None) -> bool:
        """Bring the next draw's inputs to the device, in a copy that nobody waits for.

        Args:
            sequences: of the rows of the batch, in order, all of them seated.
            late: of each, tokens that were drawn for it but are not in its books yet; none by default.

        Returns:
            Whether the likeliest token is the answer of every row, so that `draw` may be `greedy`.
        """
        count, rows = len(sequences), self._rows
        self._stage = (self._stage + 1) % _STAGES
        if self._on_gpu:
            _see_done(self._copied[self._stage])
        staged = self._staged[self._stage]
        numbers = staged.numpy()
        greedy = True
        for at, (sequence, more) in enumerate(zip(sequences, late or [0] * count, strict=True)):
            position, known = len(sequence.generated) + more, sequence.next_known(more)
            barred = position < sequence.min_tokens and bool(sequence.stop_ids)
            if known is None:
                greedy = greedy and sequence.sampling.is_greedy and not barred
            else:  # a forced token must be counted where there are penalties
                greedy = greedy and not _penalised(sequence.sampling)
            numbers[at : 4 * rows : rows] = (_row(sequence), position, -1 if known is None else known, barred)
        numbers[4 * rows] = count
        self._inputs.copy_(staged, non_blocking=True)
        if self._on_gpu:
            self._copied[self._stage].record()
        return greedy

    def draw(self, logits: Tensor, *, greedy: bool) -> Tensor:
        """The next token of every row.

        Pure device work on a GPU: nothing is waited for or allocated (but at the first call of a kind, which
        compiles), and what is read is read when it runs, so that it may be captured.

        Args:
            logits: [R, vocab], R at least as many as were prepared; float32, bfloat16 or float16.
            greedy: what `prepare` said; False is always right.

        Returns:
            [R] int32, -1 where the model computed no number to choose by; valid until the next call. Rows
            beyond those prepared mean nothing.
        """
        rows = logits.shape[0]
        seats, positions, forced, barred = self._inputs[:-1].view(4, self._rows)[:, :rows]
        inputs = SampleInputs(seats, positions, forced, barred, self._inputs[-1:])
        tokens = self.tokens[:rows]
        if not self._on_gpu:
            sample(self.tables, inputs, logits, self._scale, tokens)
            return tokens
        from services.decoder.kernels.gpu.sample import SampleCall, SampleShape  # needs the gpu extra

        key = logits.dtype, logits.shape, logits.stride(), greedy
        is_new = key not in self._shapes
        if is_new:
            kind = logits.dtype, greedy
            if kind not in self._variants:
                self._variants[kind] = SampleShape.variants(self._vocab, logits.dtype, greedy=greedy)
            self._shapes[key] = SampleShape.fitting(self._variants[kind], rows)
        shape = self._shapes[key]
        if shape.keys_per_row and self._keys is None:
            size = self._rows * shape.keys_per_row
            self._keys = torch.empty(size, dtype=torch.int32, device=self._device)
        call = SampleCall(self.tables, inputs, logits, tokens, self._scale, self._keys)
        if is_new:
            call.check(shape)
        call.launch(shape)
        return tokens

    def logprobs(self, logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        """The model's own log probabilities, before any penalty or temperature.

        Args:
            logits: [n, vocab].
            tokens: [n], the chosen ones; what is said of -1 means nothing.
            top: how many of the likeliest to tell of.

        Returns:
            [n] float32 of the tokens; [n, top] float32 and [n, top] int64, the likeliest and which they are.
        """
        logprobs = (logits.float() * self._scale).log_softmax(1)
        chosen = logprobs.gather(1, tokens.long().clamp_min(0).unsqueeze(1)).squeeze(1)
        values, ids = logprobs.topk(top)
        return chosen, values, ids

    def _sent(self, values: Tensor) -> Tensor:
        """On the device, without waiting; torch keeps the pinned memory until the copy is done."""
        return values.pin_memory().to(self._device, non_blocking=True) if self._on_gpu else values


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def _see_done(event: torch.cuda.Event) -> None:
    """Wait for it, which is for nothing unless the host is several steps ahead."""
    if not event.query():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.synchronize()


def _penalised(wish: Sampling) -> bool:
    return not (wish.repetition_penalty == 1 and wish.frequency_penalty == wish.presence_penalty == 0)


def _row(sequence: Sequence) -> int:
    assert sequence.row is not None, "only running sequences are sampled"
    return sequence.row
