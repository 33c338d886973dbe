"""What the machine and the operator allow one sequence, and all of them.

Knows counts; not who runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.contract.errors import InvalidRequest
from services.decoder.engine.sequence import Sequence
from services.decoder.engine.step_plan import Chunk


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's."""

    max_rows: int
    max_model_len: int  # tokens, prompt and answer
    max_step_tokens: int
    max_waiting: int  # sequences
    block_tokens: int
    page_tokens: int

    def check_possible(self, sequence: Sequence, host_pages: int, device_pages: int) -> None:
        """Refuse what could not even run alone.

        Raises:
            InvalidRequest: the message states the limit and the need.
        """
        most = min(self.max_model_len, host_pages * self.page_tokens, device_pages * self.page_tokens)
        need = len(sequence.prompt) + sequence.max_tokens
        if not sequence.prompt:
            raise InvalidRequest("the prompt has no tokens")
        if need > most:
            raise InvalidRequest(
                f"{len(sequence.prompt)} prompt tokens and {sequence.max_tokens} to generate need room "
                f"for {need} tokens; this server holds {most} for one choice"
            )

    def next_chunk(self, sequence: Sequence, budget: int) -> Chunk | None:
        """The next run of a prompt, at most `budget` tokens: to its end, or to a block's edge."""
        end = min(len(sequence.prompt), sequence.computed + budget)
        if end < len(sequence.prompt):
            end -= end % self.block_tokens
        return Chunk(sequence, sequence.computed, end) if end > sequence.computed else None
