"""The script that trains the embedded model, over a few steps and a few modules of text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_paged_eviction.learned.calibration import load_calibration
from hf_paged_eviction_eval.data import library
from training import calibrate, corpus, measure, tokenizer, train
from training.corpus import Corpus
from training.lessons import FINISH, LESSONS, Lesson

# Every length that a lesson may have: plain attention and the fused one, one task and several, with and without echo.
SHORT = (Lesson((24,), 2, 2, echo=1.0, tokens=256), Lesson((256,), 8, 2, echo=0.3, tokens=512))
LAST = Lesson((1200,), 24, 1, early=False, rate=0.5, tokens=1200, first=4.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder that the command filled, and what it said."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    texts = [library.source(name).replace("\t", "    ") for name in ("abc", "argparse", "ast", "bisect", "calendar")]
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        for module in (corpus, train):
            patch.setattr(module, "training_texts", lambda: texts)
        patch.setattr(tokenizer, "_REPEATS", 40)
        patch.setattr(train, "LESSONS", SHORT)
        patch.setattr(train, "FINISH", LAST)
        patch.setattr(train, "_SAVE_EVERY", 3)
        patch.setattr("sys.argv", ["train", "--output", str(folder), "--seed", "7"])
        train.main()
        yield folder, patch


def test_what_it_writes_can_be_loaded(trained: Any) -> None:
    folder, _ = trained
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    words = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert model.config.vocab_size == len(words) <= tokenizer.VOCABULARY
    assert model.dtype == torch.float32
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 500000.0
    assert model.generation_config.eos_token_id == words.eos_token_id
    ids = words("The vault opens", return_tensors="pt")
    assert ids["input_ids"][0, 0] == words.bos_token_id
    assert model(**ids).logits.isfinite().all()
    assert not list(folder.rglob("*.pt")), "progress is removed at the end"


def test_it_goes_on_where_it_was(trained: Any, tmp_path: Path) -> None:
    """Stopped after a lesson, the rest is the same as without the stop."""
    folder, _ = trained
    words = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    progress = tmp_path / "progress.pt"

    def weights(stop: bool) -> torch.Tensor:
        trainer = train.Trainer(train.new_model(words, 3), Corpus(words, 3), 1e-2)
        train.study(trainer, SHORT[:1], progress, resume=False)
        if stop:
            trainer.save(progress)
            trainer = train.Trainer(train.new_model(words, 4), Corpus(words, 4), 1e-2)
            train.study(trainer, SHORT[:1], progress, resume=True)
        assert not progress.exists()
        assert (trainer.step, trainer.lesson, trainer.lesson_step) == (2, 1, 0)
        trainer.learn([trainer.corpus.text(40)], 1.0)
        return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])

    assert torch.equal(weights(stop=False), weights(stop=True))


def test_learning_lowers_the_loss(trained: Any) -> None:
    words = AutoTokenizer.from_pretrained(trained[0], local_files_only=True)
    trainer = train.Trainer(train.new_model(words, 0), Corpus(words, 0), 1e-2)
    batch = SHORT[0].batch(trainer.corpus)
    losses = []
    for _ in range(4):
        losses.append(trainer._loss(batch, 1.0).item())
        trainer.learn(batch, 1.0)
    assert losses[-1] < losses[0]
    assert set(trainer.right) <= {"echo", "class"}


def test_a_lesson_ends_early_only_if_it_may() -> None:
    assert all(lesson.early for lesson in LESSONS[:-2])
    assert not any(lesson.early for lesson in (*LESSONS[-2:], FINISH))


@pytest.mark.parametrize("length", [30, 600])
def test_sequences_have_a_role_for_every_token(trained: Any, length: int) -> None:
    words = AutoTokenizer.from_pretrained(trained[0], local_files_only=True)
    corpus = Corpus(words, 1)
    sequences = [corpus.text(length), *(corpus.echo(length) for _ in range(12))]
    if length >= 128:
        sequences += [corpus.questions(length, 8) for _ in range(4)]
    for sequence in sequences:
        assert len(sequence.ids) == len(sequence.roles) > 1
        assert sequence.ids[0] == words.bos_token_id
        assert max(sequence.ids) < len(words)
    assert len(sequences[0].ids) == length
    assert set(sequences[0].roles) == {""}
    for sequence in sequences[1:]:
        assert set(sequence.roles) - {"", "?"}, "something is asked"
    assert Corpus(words, 1).text(length).ids == sequences[0].ids != Corpus(words, 2).text(length).ids


def test_measure_prints_a_table(trained: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(measure, "held_out_texts", lambda: {"short": "def f(x):\n    return x\n"})
    arguments = ["--model", str(trained[0]), "--lengths", "300", "--tasks", "passkey", "--count", "2"]
    monkeypatch.setattr("sys.argv", ["measure", *arguments])
    measure.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| task | 300 |"
    assert lines[2] == "| passkey | 0.000 |"
    assert "per token" in lines[3]


def test_calibrate_writes_a_calibration(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(calibrate, "_LENGTH", 256)
    monkeypatch.setattr(calibrate.windows, "__defaults__", (1000, 4, 4))
    output = tmp_path / "made.safetensors"
    monkeypatch.setattr("sys.argv", ["calibrate", "--model", str(trained[0]), "--output", str(output)])
    calibrate.main()
    assert sorted(load_calibration(output).layers) == [0, 1, 2, 3]
    printed = capsys.readouterr().out
    assert "Spearman on held-out windows" in printed and all(f'"{layer}": [' in printed for layer in range(4))
