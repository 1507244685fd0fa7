"""Who may ask: those who bring the key, and pages of the origins that were named."""

from typing import Any

import pytest
from talking import expected, prompt, serving

import driving

pytest.importorskip("typer", reason="the extra `eval` is not installed")

from hf_paged_eviction_eval.errors import UserError
from hf_paged_eviction_server.options import ServeOptions

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


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "sécret"])
@pytest.mark.parametrize("place", ["option", "variable"])
def test_a_key_that_nobody_can_send_is_refused(key: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one comes from a variable that is not set: the server would be open."""
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    from hf_paged_eviction_server.server import serve

    options: dict[str, Any] = {"model": "embedded", "budget": 32}
    if place == "variable":
        monkeypatch.setenv("PAGED_EVICTION_API_KEY", key)
    else:
        options["api_key"] = key
    with pytest.raises(UserError, match=("--api-key" if place == "option" else "PAGED_EVICTION_API_KEY") + ".* key"):
        serve(ServeOptions(**options))


@pytest.mark.parametrize("origin", ["", "example.org", "https://example.org/", "https://example.org/page", "ftp://a.b"])
def test_an_origin_that_no_page_has_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match=r"such as https://example\.org"):
        ServeOptions(model="embedded", budget=32, allow_origin=[origin])


def test_all_origins() -> None:
    with serving(allow_origin=["*"]) as served:
        wanted = {"Origin": "https://there.example", "Access-Control-Request-Method": "POST"}
        asking = served.http.options("/v1/completions", headers=wanted)
        assert (asking.status_code, asking.headers["access-control-allow-origin"]) == (200, "*")
