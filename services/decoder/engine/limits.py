"""What the machine and the operator allow one sequence, and all of them.

Knows counts; not who runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.contract.errors import InvalidRequest
from services.decoder.engine.sequence import Sequence
from services.decoder.engine.step_plan import Chunk, StepPlan

_CONTEXT_OF_A_TOKEN = 12
"""Context that a chunk's token hides. Qwen3-8B keeps 4 KB of a token in a layer: 82 ns at 50 GB/s. A chunk of
c tokens computes c x (0.5 us + 24 ps x context) a layer (H200, November 2026), so that 960 tokens hide 8K,
2,100 hide 32K, 2,600 hide 64K, and 3,400 any context."""
_COMMON_TOKENS = 512


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

    def next_chunk(self, sequence: Sequence, plan: StepPlan, start: int | None = None) -> Chunk | None:
        """The next run of a prompt beside what the plan has already: to its end, or to a page's edge.

        `start` is where it begins, by default behind what is computed. None if the step has no room for a
        block of it.
        """
        start = sequence.computed if start is None else start
        room = self.max_step_tokens - plan.tokens
        if plan.decodes:
            room = min(room, self._beside_decodes(start) - plan.tokens + len(plan.decodes))
        length = min(room, len(sequence.prompt) - start)
        if length < len(sequence.prompt) - start:
            # Lengths that come back are planned for once by the attention of some devices.
            many = max(1, _COMMON_TOKENS // self.page_tokens) * self.page_tokens
            unit = next((unit for unit in (many, self.page_tokens) if unit <= length), self.block_tokens)
            length -= length % unit
        return Chunk(sequence, start, start + length) if length > 0 else None

    def _beside_decodes(self, context: int) -> int:
        """Tokens of prompts in a step with decode rows, whose next token waits for them.

        A quarter of the step at first, three quarters at long contexts: the longer the context, the longer
        its records take to come over the link, and a chunk must compute for as long to hide that.
        """
        least, most = self.max_step_tokens // 4, self.max_step_tokens * 3 // 4
        return max(self.block_tokens, min(most, max(least, context // _CONTEXT_OF_A_TOKEN)))
