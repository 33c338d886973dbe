"""docs/openai_api.md names every field, code and route there is."""

from __future__ import annotations

from typing import get_args

import httpx

from services.decoder.front import errors
from services.decoder.front.auth import OPEN_PATHS
from services.decoder.front.schema.chat import ChatRequest
from services.decoder.front.schema.completions import CompletionRequest
from tests.front.live import ROOT, LiveFront
from tests.front.test_errors import ELSEWHERE, PROVOKED


def test_the_page_is_complete(front: LiveFront) -> None:
    page = (ROOT / "docs/openai_api.md").read_text()
    for schema in (ChatRequest, CompletionRequest):
        for field in (*schema.model_fields, *schema.unserved):
            assert f"`{field}" in page, field
    for code in (*PROVOKED, *ELSEWHERE, *get_args(errors.RequestCode)):
        assert f"`{code}`" in page, code
    for path in httpx.get(f"{front.url}/openapi.json").json()["paths"]:
        assert path.replace("{model}", "{id}") in page, path
    for path in OPEN_PATHS:
        assert f"`{path}`" in page, path
