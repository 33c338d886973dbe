"""What this server does of a request: all of it, its prompt only, or what follows a prompt read elsewhere.

Knows prompts and another server's URL; no store. The pages travel between the stores (docs/transport.md):
here the other server is asked to read a prompt, and when it has, this one's engine finds the pages by their
hashes. Best effort: whatever goes wrong, the prompt is computed here.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from services.decoder.front.errors import BadRequest
from services.decoder.front.sampling import Plan
from services.decoder.settings import DecoderSettings

_log = logging.getLogger(__name__)
_REST_SECONDS = 5.0  # a node that failed is left alone for so long


class PrefillNode:
    """Another server that reads prompts, whose store this one's store names among its peers."""

    def __init__(self, url: str, model: str, seconds: float, page_tokens: int) -> None:
        """Ask the server at `url`, which serves `model`, and wait for `seconds` at most.

        Prompts that fill no page are left out.
        """
        parts = urlsplit(url)
        self._url = url
        self._model = model
        self._host, self._port, self._secure = parts.hostname or "", parts.port, parts.scheme == "https"
        self._path = f"{parts.path.rstrip('/')}/v1/completions"
        self._seconds = seconds
        self._page_tokens = page_tokens
        self._rests_until = 0.0

    async def read(
        self, prompts: Sequence[Sequence[int]], authorization: str | None, cache_salt: str
    ) -> None:
        """Have it compute the long ones of `prompts`. Raises nothing: what fails is logged.

        Args:
            prompts: token ids of each.
            authorization: the client's header; it says whose pages they are, there as here.
            cache_salt: as the client sent it.
        """
        long = [list(prompt) for prompt in prompts if len(prompt) > self._page_tokens]
        if not long or time.monotonic() < self._rests_until:
            return
        body = {"model": self._model, "prompt": long, "max_tokens": 1, "temperature": 0}
        if cache_salt:
            body["cache_salt"] = cache_salt
        headers = {"content-type": "application/json"}
        if authorization is not None:
            headers["authorization"] = authorization
        begun = time.monotonic()
        try:
            await asyncio.to_thread(self._post, json.dumps(body), headers)
        except (OSError, http.client.HTTPException) as error:
            self._rests_until = time.monotonic() + _REST_SECONDS
            _log.warning("prefill_failed node=%s error=%s", self._url, error or type(error).__name__)
            return
        _log.info("prefilled node=%s prompts=%d seconds=%.3f", self._url, len(long), time.monotonic() - begun)

    def _post(self, body: str, headers: dict[str, str]) -> None:
        kind: Any = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._seconds)
        try:
            connection.request("POST", self._path, body, headers)
            answer = connection.getresponse()
            told = answer.read(1000).decode("utf-8", "replace")
            if answer.status != 200:
                raise OSError(f"it answered {answer.status}: {told}")
        finally:
            connection.close()


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
