"""`paged-eviction compress`: a file that answers."""

from pathlib import Path

import pytest
import torch

from hf_paged_eviction import PagedEvictionCache
from hf_paged_eviction.integration.cache_argument import CACHE_ARGUMENT
from hf_paged_eviction_eval import embedded
from hf_paged_eviction_eval.caches.contexts import text_ids
from hf_paged_eviction_eval.tasks import make_samples
from invoking import run

MODEL, TOKENIZER = embedded.load()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(make_samples("kv_recall", TOKENIZER, length=512, count=1, seed=1)[0].context, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("size", "policy"),
    [(("--budget", 128), "keydiff"), (("--budget", "256KiB"), "snapkv(window=16)"), (("--budget", 128), "h2o@pyramid")],
)
def test_reads_once_and_answers(text: Path, tmp_path: Path, size: tuple[str, object], policy: str) -> None:
    output = tmp_path / "context.safetensors"
    words = ("--text", text, "--output", output, *size, "--policy", policy, "--prefill-chunk-size", 200)
    result = run("compress", *words)
    assert "held in a layer at most: 256.0 KiB, and 0 bytes" in " ".join(result.output.split())
    sample = make_samples("kv_recall", TOKENIZER, length=512, count=1, seed=1)[0]
    model = embedded.load(attn_implementation="sdpa" if policy == "keydiff" else "paged_eviction")[0]
    cache = PagedEvictionCache.load(output, model.config)
    assert cache.budget == 128
    ids = text_ids(TOKENIZER, sample.context)
    assert cache.get_seq_length() == ids.shape[1]
    PagedEvictionCache.load(output, model.config, input_ids=ids)
    inputs = cache.follow_up(TOKENIZER(sample.question, return_tensors="pt", add_special_tokens=False).input_ids)
    sequences = model.generate(**inputs, **{CACHE_ARGUMENT: cache}, max_new_tokens=3, do_sample=False)
    again = PagedEvictionCache.load(output, model.config)
    whole = torch.cat([ids, inputs["input_ids"][:, ids.shape[1] :]], dim=1)
    same = model.generate(whole, **{CACHE_ARGUMENT: again}, max_new_tokens=3, do_sample=False)
    assert sequences[:, ids.shape[1] :].tolist() == same[:, ids.shape[1] :].tolist()
    if policy == "keydiff":
        assert TOKENIZER.decode(sequences[0, whole.shape[1] :]).split()[0].startswith(sample.answers[0])


@pytest.mark.parametrize(("policy", "bits"), [("keydiff", None), ("keydiff", 4)])
def test_a_share_of_memory_is_that_of_the_whole_text(text: Path, tmp_path: Path, policy: str, bits: int | None) -> None:
    """Not of a chunk of it, and in 16 bits, whatever the model runs in."""
    output, chosen = tmp_path / "context.safetensors", () if bits is None else ("--bits", bits)
    words = ("--text", text, "--output", output, "--policy", policy, "--prefill-chunk-size", 100, *chosen)
    run("compress", *words, "--budget", "50% of memory")
    share = PagedEvictionCache.load(output, MODEL.config)
    tokens = text_ids(TOKENIZER, text.read_text("utf-8")).shape[1]
    config = MODEL.config
    token_bytes = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    run("compress", *words, "--budget", f"{tokens * token_bytes // 2}B")
    assert PagedEvictionCache.load(output, config).budget == share.budget
    assert share.get_seq_length() == tokens


def test_a_share_is_that_of_the_tokens_of_the_whole_text(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "context.safetensors"
    words = ("--text", text, "--output", output, "--policy", "keydiff", "--prefill-chunk-size", 100)
    run("compress", *words, "--budget", "50%")
    cache = PagedEvictionCache.load(output, MODEL.config)
    assert cache.budget == -(-cache.get_seq_length() // 2 // 16) * 16
