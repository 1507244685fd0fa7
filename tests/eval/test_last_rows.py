"""Models that remember how the positions of their last text were numbered: the harness begins as with a new one."""

import torch

from batches import VOCABULARY, all_rows, make_batch, said
from families.building import build
from families.listing import families
from hf_paged_eviction_eval.options.settings import TaskSettings


def test_the_harness_begins_anew() -> None:
    """After an image, and after an image in one of two rows."""
    model = build(next(family for family in families() if str(family) == "qwen2_5_vl-image"))
    model.resize_token_embeddings(VOCABULARY)
    settings = TaskSettings(policies=("keydiff",), budgets=("60%", "full"), block_size=4, tasks=("passkey",))
    batches = [make_batch(lengths, question=5) for lengths in ((60, 40), (50,))]
    expected = [said(all_rows(model, settings, batch)) for batch in batches]
    for deltas in (torch.tensor([[-12]]), torch.tensor([[-12], [3]])):
        for module in model.modules():
            if "rope_deltas" in vars(module):
                module.rope_deltas = deltas
        assert [said(all_rows(model, settings, batch)) for batch in batches] == expected
