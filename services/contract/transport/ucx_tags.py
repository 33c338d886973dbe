"""The tags of our messages: what a message is, and whose or to what.

bits [56, 64)  1: to a responder; 2: to a requester
bits [0, 48)   to a responder: the requester's number, of its own choice at random
               to a requester: the sequence of the request that is answered
"""

from __future__ import annotations

TO_RESPONDER, TO_REQUESTER = 1 << 56, 2 << 56
KIND_MASK = 0xFF << 56
NUMBER_MASK = (1 << 48) - 1


def to_responder(requester: int) -> int:
    """The tag of what a requester sends."""
    return TO_RESPONDER | requester


def to_requester(sequence: int) -> int:
    """The tag of the answer to a request."""
    return TO_REQUESTER | (sequence & NUMBER_MASK)
