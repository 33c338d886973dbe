"""Needle in a haystack: magic numbers hidden in real text, each asked for through the chat template.

Knows prompts and answers; not what computes them. A haystack holds one number for each of several cities,
so that one prefill serves several questions and an answer must come from the right place.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.quality.prefilled import BLOCK_TOKENS
from benchmarks.real_text import real_tokens
from services.decoder.front.text.chat import ChatTemplate

SUBJECTS = (
    "The special magic number for Paris",
    "The secret code of the old library door",
    "The phone number of Anna's bakery",
    "The weight of the blue whale in kilograms",
    "The ticket number of the winning lottery player",
    "The year in which the robot army will arrive",
    "The population of the hidden village of Elmswood",
    "The price of the golden violin in dollars",
    "The locker number of the champion swimmer",
    "The serial number of the broken submarine",
)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the haystack
DIGITS = 5
_MARK = "\x00text\x00"
_LATEST_START = 90_000  # tokens into the text


@dataclass(frozen=True, slots=True)
class Question:
    """What follows the haystack, and what is the right answer."""

    depth: float
    prompt: list[int]  # the rest of the user's message and the answer's opening, but for `opening`
    opening: list[int]  # the last tokens before the number: given, but computed by decode steps
    number: list[int]


@dataclass(frozen=True, slots=True)
class Haystack:
    """A prefix of exactly the wanted length, and its questions."""

    prefix: list[int]
    questions: tuple[Question, ...]


def haystack(path: Path, tokenizer: Tokenizer, tokens: int, seed: int) -> Haystack:
    """`tokens` tokens, a multiple of a block, with a number at each depth; the same for the same seed."""
    assert tokens % BLOCK_TOKENS == 0
    draw = random.Random(1000 * tokens + seed)
    template = ChatTemplate.from_directory(path)
    rendered = template.render([{"role": "user", "content": _MARK}])
    before, after = rendered.split(_MARK)

    def ids(text: str) -> list[int]:
        encoded: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return encoded

    subjects = draw.sample(SUBJECTS, len(DEPTHS))
    numbers = ["".join(draw.choices("0123456789", k=DIGITS)) for _ in DEPTHS]
    needles = [
        ids(f"\n\n{subject} is {number}.\n\n") for subject, number in zip(subjects, numbers, strict=True)
    ]
    opened = ids(f"{before}Read the text and remember the numbers that are hidden in it.\n\n")
    room = tokens - len(opened) - sum(map(len, needles))
    text = real_tokens(tokenizer, room, skip=draw.randrange(_LATEST_START))
    prefix, at = opened, 0
    for depth, needle in zip(DEPTHS, needles, strict=True):
        here = int(depth * room)
        prefix = prefix + text[at:here] + needle
        at = here
    prefix = prefix + text[at:]
    questions = []
    for depth, subject, number in zip(DEPTHS, subjects, numbers, strict=True):
        asked = ids(f"\n\nWhat is {subject[0].lower()}{subject[1:]}?{after}{subject}")
        answer = ids(f" is {number}")
        questions.append(Question(depth, asked, answer[:-DIGITS], answer[-DIGITS:]))
    return Haystack(prefix, tuple(questions))
