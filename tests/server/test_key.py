"""Who may ask: those who bring the key, and pages of the origins that were named."""

from __future__ import annotations

from typing import Any

import pytest
from talking import expected, prompt, serving

import driving

pytest.importorskip("typer", reason="the extra `eval` is not installed")
pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)

TEXT: dict[str, Any] = {"model": "embedded", "prompt": prompt(1), "max_tokens": 12}


def test_a_key_and_an_origin() -> None:
    """Who does not bring the key is turned away; pages of another origin are told nothing."""
    here = "https://here.example"
    with serving(api_key="secret", allow_origin=[here]) as served:
        for key in ("none", "secre", "secrets", "sécret"):
            got = served.http.post("/v1/completions", json=TEXT, headers={"Authorization": f"Bearer {key}".encode()})
            assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")
        assert served.http.get("/metrics").status_code == 401
        assert served.http.get("/health").status_code == 200
        client = served.client.with_options(api_key="secret")
        assert client.completions.create(**TEXT).choices[0].text == expected(prompt(1), 12)
        for origin, allowed in ((here, here), ("https://there.example", None)):
            wanted = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            asking = served.http.options("/v1/completions", headers=wanted)
            assert asking.headers.get("access-control-allow-origin") == allowed
            assert asking.status_code == (200 if allowed else 400)
