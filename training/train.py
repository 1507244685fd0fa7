"""Train the embedded model from nothing: `python -m training.train --help`.

The result is a function of the seed, the Python version (its standard library is the text), the machine's arithmetic
and the versions of torch and tokenizers.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from . import tokenizer as tokenizers
from .architecture import new_model
from .corpus import Corpus, training_texts
from .export import export
from .lessons import FINISH, LESSONS, Lesson
from .trainer import Trainer

_GOOD = 0.93  # answer tokens right, on the worst task, at which the next lesson starts early
_LEAST_STEPS = 200
_SAVE_EVERY = 200


def run(output: Path, seed: int, rate: float, resume: bool) -> None:
    """Train through all lessons, then through the finish, saving as it goes."""
    start = output / "start"
    start.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.train(training_texts())
    if not (resume and (start / "model.safetensors").exists()):
        model = new_model(tokenizer, seed)
        study(Trainer(model, Corpus(tokenizer, seed), rate), LESSONS, start / "progress.pt", resume)
        export(model, tokenizer, start)
    model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32, use_safetensors=True)
    study(Trainer(model, Corpus(tokenizer, seed + 1), rate), (FINISH,), output / "progress.pt", resume)
    export(model, tokenizer, output)


def study(trainer: Trainer, lessons: tuple[Lesson, ...], progress: Path, resume: bool) -> None:
    """All lessons in order; what is needed to go on after a stop lies in `progress` meanwhile."""
    if resume and progress.exists():
        trainer.restore(progress)
    while trainer.lesson < len(lessons):
        teach(trainer, lessons[trainer.lesson], progress)
    progress.unlink(missing_ok=True)


def teach(trainer: Trainer, lesson: Lesson, progress: Path) -> None:
    """One lesson: to its end, or until every task is good when it may end early."""
    start, before = time.monotonic(), trainer.tokens
    done = False
    while not done:
        decay = 1.0 if lesson.early else max(0.02, 1 - (trainer.lesson_step + 1) / lesson.steps)
        trainer.learn(lesson.batch(trainer.corpus), lesson.rate * decay, lesson.first)
        good = trainer.lesson_step >= _LEAST_STEPS and min(trainer.right.values(), default=0.0) > _GOOD
        done = trainer.lesson_step >= lesson.steps or (lesson.early and good)
        if trainer.step % 50 == 0 or done:
            report(trainer, (trainer.tokens - before) / (time.monotonic() - start))
        if done:
            trainer.next_lesson()
        if trainer.step % _SAVE_EVERY == 0:
            trainer.save(progress)


def report(trainer: Trainer, speed: float) -> None:
    """One line about the state of things."""
    accuracy = " ".join(f"{name} {value:.2f}" for name, value in sorted(trainer.right.items()))
    where = f"lesson {trainer.lesson} step {trainer.step} tokens {trainer.tokens / 1e6:.2f}M {speed:.0f}/s"
    print(f"{where} text loss {trainer.text_loss:.2f} answer tokens right: {accuracy}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and its tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from progress.pt in the output folder")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    run(arguments.output, arguments.seed, arguments.rate, arguments.resume)


if __name__ == "__main__":
    main()
