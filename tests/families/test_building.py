"""The tiny models: of every family, with a layer of every kind, and small."""

import re
from itertools import chain
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from families import building
from families.listing import families
from families.outcomes import Outcome
from families.overrides import SETTINGS, VARIANTS
from families.shrinking import MOST_LAYERS, VOCABULARY, shrink
from families.table import page, words_of

BY_NAME = {str(family): family for family in families()}


def test_every_class_of_the_tables_is_listed() -> None:
    tables = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )
    names = set(chain.from_iterable(table.values() for table in tables))
    assert names <= {family.class_name for family in families()}
    assert len(BY_NAME) == len(families()), "two families of one name"
    assert {(model_type, name) for name, model_type, _ in VARIANTS} == {
        (family.model_type, family.variant) for family in families() if family.variant
    }


@pytest.mark.parametrize("model_type", "gemma3_text qwen3_next lfm2 minimax_m2 llama4_text deepseek_v4 zamba2".split())
def test_a_tiny_model_has_layers_of_every_kind(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    tiny = shrink(config)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    left = getattr(tiny, "layer_types", None) or getattr(tiny, "layers_block_type", None) or []
    assert set(left) == set(kinds)
    assert 2 <= tiny.num_hidden_layers <= MOST_LAYERS
    assert len(left) in (0, tiny.num_hidden_layers)


def test_parts_shrink_too() -> None:
    tiny = shrink(AutoConfig.for_model("qwen2_5_vl"))
    assert tiny.text_config.hidden_size == tiny.vision_config.out_hidden_size == 64
    assert tiny.text_config.vocab_size == VOCABULARY
    assert tiny.image_token_id < VOCABULARY
    assert sum(tiny.text_config.rope_parameters["mrope_section"]) == 8


def test_overrides_belong_to_something() -> None:
    assert set(SETTINGS) <= set(CONFIG_MAPPING_NAMES)


def test_a_default_of_gigabytes_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "MOST_PARAMETERS", 10_000)
    with pytest.raises(building.UnbuildableError, match="million parameters"):
        building.build(BY_NAME["llama"])
    monkeypatch.setattr(building, "shrink", lambda config, **settings: config)
    with pytest.raises(building.UnbuildableError, match=r"\d{4} million parameters"):
        building.build(BY_NAME["llama"])


def test_the_same_weights_for_the_same_seed() -> None:
    first, second = (building.build(BY_NAME["gpt_oss"]).state_dict() for _ in range(2))
    assert all(first[name].equal(second[name]) for name in first)


def test_the_list_has_no_wrong_family() -> None:
    listed = re.search(
        r"\n\d+ families: .*\.\n", (Path(__file__).parents[2] / "docs" / "reference" / "families.md").read_text("utf-8")
    )
    assert listed is not None
    assert "wrong" not in listed.group()


def test_the_page_tells_what_it_was_made_of() -> None:
    rows = [
        Outcome("plain", "A", "exact"),
        Outcome("windows", "B", "exact", ("layer 0 of this model has a sliding window. Use static=False.",)),
        Outcome("more", "C", "exact", ("layer 3 of this model has a sliding window. Use static=False.",)),
        Outcome("alibi", "D", "refused", ("alibi uses ALiBi.",), ("a row depends on its pads",)),
    ]
    text = page(rows)
    assert words_of(text) == {row.family: row.word for row in rows}
    assert "| `windows`, `more` | a layer of this model has a sliding window |" in text
    assert "| `alibi` (pads) | uses ALiBi. |" in text
