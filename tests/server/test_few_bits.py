"""A server that stores few bits. It is in a module of its own, because a model serves once at a time."""

import re

import pytest
from talking import CHUNK, OPTIONS, embedded, prompt, serving

import driving

pytest.importorskip("typer", reason="the extra `eval` is not installed")
pytestmark = pytest.mark.skipif(bool(driving.UNSERVED), reason=driving.UNSERVED)


def test_few_bits() -> None:
    """As alone with as many bits, in pages that hold more tokens."""
    model, tokenizer = embedded.__wrapped__()
    with serving(bits="4") as server:
        answers = [
            server.client.completions.create(model="embedded", prompt=prompt(at), max_tokens=12) for at in range(2)
        ]
        assert float(re.findall(r"page_tokens ([0-9.]+)", server.http.get("/metrics").text)[0]) > 32
    for at, answer in enumerate(answers):
        ids = tokenizer(prompt(at))["input_ids"]
        wanted = driving.alone(model, ids, 12, prefill_chunk_size=CHUNK, **OPTIONS, bits=4)
        assert answer.choices[0].text == tokenizer.decode(wanted, skip_special_tokens=True)
