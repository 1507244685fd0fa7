"""What the page on operations says of `/metrics` is what there is."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    """Samples by name, each with its labels, after one of everything."""
    pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")
    from prometheus_client.parser import text_string_to_metric_families

    from hf_paged_eviction_server.metrics import Meter
    from hf_paged_eviction_server.stats import BatchingStats

    meter = Meter(BatchingStats)
    for end in ("stop", "length", "cancelled", "failed"):
        meter.ended.labels(end).inc()
    meter.refuse(429)
    families = text_string_to_metric_families(meter.as_text().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_the_table_is_complete(metrics: dict[str, Any]) -> None:
    lines = PAGE.read_text().partition("## What to watch")[2].splitlines()
    rows = [line.split("|")[1] for line in lines if line.startswith("| `") and "(" not in line]
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    names = {name.removeprefix("paged_eviction_") for name in metrics if not name.endswith("_created")}
    there = {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}
    assert documented == there


def test_panels_ask_for_what_there_is(metrics: dict[str, Any]) -> None:
    text = PAGE.read_text().partition("## What to watch")[2]
    (panel,) = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL)]
    queries = [target["expr"] for target in panel["targets"]] + re.findall(r"`([^`]*paged_eviction_\w[^`]*)`", text)
    assert len(queries) >= 7
    for query in queries:
        assert query.count("(") == query.count(")")
        names = re.findall(r"paged_eviction_\w+", query)
        assert names and set(names) <= metrics.keys(), query
        labels = {label for group in re.findall(r"by \(([\w, ]+)\)", query) for label in group.split(", ")}
        labels |= set(re.findall(r"[{,]\s*(\w+)=", query))
        assert labels <= set().union(*(metrics[name] for name in names)), query
