"""What this server does of a request: all of it, its prompt only, or what follows a prompt read elsewhere.

Knows prompts and another server's URL; no store. The pages travel between the stores (docs/transport.md):
here the other server is asked to read a prompt, and when it has, this one's engine finds the pages by their
hashes. Best effort: whatever goes wrong, the prompt is computed here.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Sequence

import httpx

from services.decoder.front.errors import BadRequest
from services.decoder.front.sampling import Plan
from services.decoder.settings import DecoderSettings

_log = logging.getLogger(__name__)
_REST_SECONDS = 5.0  # a node that cannot be had is left alone for so long
_FULL = 429
_FAULTS = 500  # this status and those above


class PrefillNode:
    """Another server that reads prompts, whose store this one's store names among its peers."""

    def __init__(self, url: str, model: str, seconds: float, page_tokens: int) -> None:
        """Ask the server at `url`, which serves `model`, and wait for `seconds` at most.

        Prompts that fill no page are left out.
        """
        self._url = url
        self._model = model
        self._seconds = seconds
        self._page_tokens = page_tokens
        self._rests_until = 0.0
        self._trusted = ssl.create_default_context()  # made once: it reads some hundred certificates

    async def read(
        self, prompts: Sequence[Sequence[int]], authorization: str | None, cache_salt: str, priority: int = 0
    ) -> None:
        """Have it compute the long ones of `prompts`. Raises nothing: what fails is logged.

        Cancelled, it hangs up, and the other server ends the work.

        Args:
            prompts: token ids of each.
            authorization: the client's header; it says whose pages they are, there as here.
            cache_salt: as the client sent it.
            priority: likewise.
        """
        long = [list(prompt) for prompt in prompts if len(prompt) > self._page_tokens]
        if not long or time.monotonic() < self._rests_until:
            return
        body = {"model": self._model, "prompt": long, "max_tokens": 1, "temperature": 0}
        if cache_salt:
            body["cache_salt"] = cache_salt
        if priority:
            body["priority"] = priority
        headers = {} if authorization is None else {"authorization": authorization}
        begun = time.monotonic()
        try:
            async with (
                asyncio.timeout(self._seconds),
                httpx.AsyncClient(timeout=None, trust_env=False, verify=self._trusted) as client,
            ):
                url = f"{self._url.rstrip('/')}/v1/completions"
                answer = await client.post(url, json=body, headers=headers)
        except (TimeoutError, httpx.TransportError) as error:
            self._failed(str(error) or type(error).__name__, rest=True)
            return
        if answer.status_code != httpx.codes.OK:
            # A refusal is of this request alone.
            gone = answer.status_code >= _FAULTS or answer.status_code == _FULL
            self._failed(f"it answered {answer.status_code}: {answer.text[:1000]}", rest=gone)
            return
        _log.info("prefilled node=%s prompts=%d seconds=%.3f", self._url, len(long), time.monotonic() - begun)

    def _failed(self, error: str, *, rest: bool) -> None:
        if rest:
            self._rests_until = time.monotonic() + _REST_SECONDS
        _log.warning("prefill_failed node=%s error=%s", self._url, error)


class Role:
    """Of one server; without arguments it does all of every request itself."""

    def __init__(self, *, prefill_only: bool = False, node: PrefillNode | None = None) -> None:
        self._prefill_only = prefill_only
        self.node = node

    def check(self, plan: Plan) -> None:
        """Refuse what this server is not there for.

        Raises:
            BadRequest: an answer is wanted of one that reads prompts only.
        """
        if self._prefill_only and (plan.most_tokens is None or plan.most_tokens > 1):
            raise BadRequest(
                "this server reads prompts for others (--prefill-only): ask with max_tokens 1, or ask the "
                "server that decodes",
                param="max_tokens",
            )


def role_of(settings: DecoderSettings, model: str) -> Role:
    """The role that the settings name, of a server of `model`."""
    node = None
    if settings.decode_from:
        node = PrefillNode(settings.decode_from, model, settings.prefill_seconds, settings.page_tokens)
    return Role(prefill_only=settings.prefill_only, node=node)
