"""A model and a tokenizer small enough to be made for the test run."""

from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic", reason="the extra `eval` is not installed")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_paged_eviction.queries.attention import PAGED_EVICTION
from processes import Commands, rows_of
from scripts import load

VOCABULARY = 600


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Byte-level BPE: encodes any text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<eos>"],
        show_progress=False,
    )
    core.train_from_iterator([Path(torch.__file__).read_text("utf-8")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="session")
def model() -> Any:
    """Random weights in float64, so that two ways to compute the same thing agree on every argmax."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="session")
def showing(model: Any) -> Any:
    """The model, with an attention that shows queries."""
    other = deepcopy(model)
    other.set_attn_implementation(PAGED_EVICTION)
    return other


@pytest.fixture(scope="session")
def model_folder(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where `--model` finds them."""
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def words(model_folder: str) -> list[str]:
    """A run of 24 rows: two tasks, four samples, the full cache and two policies."""
    text = f"eval --model {model_folder} --device cpu --tasks passkey,kv_recall --policies paged_eviction,recency"
    return f"{text} --limit 4 --length 160 --batch-size 2 --budgets 10%,full --block-size 8".split()


@pytest.fixture(scope="session")
def expected(commands: Commands, words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its folder, where one process did it and nobody disturbed it."""
    folder = tmp_path_factory.mktemp("expected")
    status, output = commands.run([*words, "--output", str(folder)])
    assert status == 0, output
    assert len(rows_of(folder)) == 24
    return folder


@pytest.fixture
def generate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script that writes the generated parts of the docs."""
    folder = Path(__file__).parents[2] / "docs" / "_generate"
    monkeypatch.syspath_prepend(str(folder))
    return load(folder / "__main__.py")


@pytest.fixture
def drawn() -> None:
    """Asked for by tests that look at pictures."""


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are empty where nobody asks for `drawn`: to draw them would be most of the time of a run."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **how: None)
