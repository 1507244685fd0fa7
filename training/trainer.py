"""One optimiser step, and the state between two of them."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from .corpus import Corpus, Sequence

_TEXT_LOSS = 0.5  # weight of the language-model loss against the loss on answers
_TEXT_KEPT = 0.5  # share of text positions that are scored: the output layer is a third of the compute
_WARMUP = 200
_SHORT = 128  # up to here plain attention is faster on a CPU than the fused kernel


class Trainer:
    """Model, optimiser, and how well each task went lately."""

    def __init__(self, model: LlamaForCausalLM, corpus: Corpus, rate: float) -> None:
        self.model, self.corpus, self.rate = model, corpus, rate
        self.optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        self.right: dict[str, float] = defaultdict(float)
        self.text_loss = 10.0
        self.step = self.tokens = self.lesson = self.lesson_step = 0

    def learn(self, sequences: list[Sequence], decay: float, first: float = 1.0) -> None:
        """One step at the full learning rate times `decay`; an answer's first token counts `first` times."""
        self.step += 1
        self.lesson_step += 1
        self.tokens += sum(len(sequence.ids) for sequence in sequences)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * min(1.0, self.step / _WARMUP) * decay
        loss = self._loss(sequences, first)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def next_lesson(self) -> None:
        self.lesson, self.lesson_step, self.right = self.lesson + 1, 0, defaultdict(float)

    def save(self, path: Path) -> None:
        """Write all that is needed to go on."""
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "rng": self.corpus.rng.getstate(),
                "right": dict(self.right),
                "counts": (self.step, self.tokens, self.lesson, self.lesson_step),
            },
            path,
        )

    def restore(self, path: Path) -> None:
        """Go on from there; only the filler run that was under way is another one."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.corpus.rng.setstate(state["rng"])
        self.right.update(state["right"])
        self.step, self.tokens, self.lesson, self.lesson_step = state["counts"]

    def _loss(self, sequences: list[Sequence], first: float) -> torch.Tensor:
        width = max(len(sequence.ids) for sequence in sequences)
        self.model.set_attn_implementation("eager" if width <= _SHORT else "sdpa")
        ids = torch.tensor([sequence.ids + [0] * (width - len(sequence.ids)) for sequence in sequences])
        padded = [sequence.roles[1:] + ["?"] * (width - len(sequence.ids) + 1) for sequence in sequences]
        roles = [role for row in padded for role in row]  # of the token that follows
        kept = [i for i, role in enumerate(roles) if self._is_scored(role)]
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden.flatten(0, 1)[kept]).float()
        targets = ids.roll(-1, 1).flatten()[kept]
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        names = [roles[i] for i in kept]
        text = torch.tensor([name == "" for name in names])
        self._note(names, (logits.argmax(-1) == targets).tolist(), losses.detach()[text])
        # Sums over counts, not means: a batch may have no text, or no answers.
        loss: torch.Tensor = _TEXT_LOSS * losses[text].sum() / text.sum().clamp(min=1)
        begins = [first if roles[i - 1] != roles[i] else 1.0 for i in kept]
        weights = torch.tensor(begins)[~text]
        return loss + (losses[~text] * weights).sum() / weights.sum().clamp(min=1)

    def _is_scored(self, role: str) -> bool:
        return self.corpus.rng.random() < _TEXT_KEPT if role == "" else role != "?"

    def _note(self, names: list[str], right: list[bool], text: torch.Tensor) -> None:
        """Running means of the accuracy on answer tokens by task, and of the loss on text."""
        seen: dict[str, list[bool]] = defaultdict(list)
        for name, hit in zip(names, right, strict=True):
            if name:
                seen[name].append(hit)
        for name, hits in seen.items():
            self.right[name] += 0.05 * (sum(hits) / len(hits) - self.right[name])
        if len(text):
            self.text_loss += 0.02 * (float(text.mean()) - self.text_loss)
