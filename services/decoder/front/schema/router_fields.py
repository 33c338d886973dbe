"""Fields that routers add to whatever passes through them, always with values that ask for nothing.

vllm-router 0.1 and sglang-router 0.3 read a request and write it anew, with every field they know.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.decoder.front.schema.base import Unserved

_NO_REASONING = Unserved((True, False))  # no part of an answer is taken for reasoning: neither asks for any

COMPLETION_FIELDS: Mapping[str, Unserved] = {
    "no_stop_trim": Unserved((False,), "use include_stop_str_in_output"),
    "skip_special_tokens": Unserved((True,)),
    "return_hidden_states": Unserved((False,)),
}

CHAT_FIELDS: Mapping[str, Unserved] = {
    **COMPLETION_FIELDS,
    "continue_final_message": Unserved((False,), "an answer is a message of its own"),
    "separate_reasoning": _NO_REASONING,
    "stream_reasoning": _NO_REASONING,
    "include_reasoning": _NO_REASONING,
}
