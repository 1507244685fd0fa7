"""How a request chooses its tokens."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

#: Range of the repetition penalty; beyond it, logits could exceed float32.
LEAST_PENALTY, MOST_PENALTY = 0.01, 100.0


@dataclass(frozen=True)
class Sampling:
    """The sampling options of a request.

    Attributes:
        temperature: temperature of the distribution; 0 = always the most likely token.
        top_p: draw only from the most likely tokens that together have this probability.
        top_k: draw only from this number of most likely tokens; 0 = all.
        min_p: draw only from tokens at least as likely as this share of the most likely one.
        seed: seed of the draws. The same seed gives the same tokens, whatever other requests run. None = a new seed
            each time.
        repetition_penalty: logits of tokens in prompt and answer are divided by it (multiplied, if negative); from 0.01
            to 100.
        presence_penalty: subtracted from the logits of tokens in the answer.
        frequency_penalty: subtracted from the logits of tokens in the answer, once for each occurrence.
        logit_bias: number by token, added to its logit.

    Raises:
        ValueError: a number is outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_p: float = 0.0

    def __post_init__(self) -> None:
        penalty = LEAST_PENALTY <= self.repetition_penalty <= MOST_PENALTY
        for name, right, range_ in (
            ("temperature", 0 <= self.temperature < math.inf, "at least 0 and finite"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "a 64-bit number"),
            ("repetition_penalty", penalty, f"from {LEAST_PENALTY} to {MOST_PENALTY}"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "finite"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "finite"),
            ("logit_bias", all(map(math.isfinite, self.logit_bias.values())), "finite for each token"),
        ):
            if not right:
                raise ValueError(f"{name} must be {range_}, got {getattr(self, name)}.")

    @classmethod
    def of(cls, config: Any) -> "Sampling":
        """The options in a model's `GenerationConfig`."""
        settings: dict[str, Any] = {"temperature": 1.0} if config.do_sample else {}
        for name in ("repetition_penalty", *(("temperature", "top_p", "top_k", "min_p") if config.do_sample else ())):
            if getattr(config, name, None) is not None:
                settings[name] = getattr(config, name)
        return cls(**settings)


class Sampler:
    """Chooses the tokens of one request: `manager.add_request(..., sampler=Sampler(Sampling(temperature=0.7)))`.

    Attributes:
        settings: sampling options.
    """

    def __init__(self, settings: Sampling) -> None:
        self.settings = settings
        self._generator: torch.Generator | None = None

    def sibling(self, number: int) -> "Sampler":
        """Make the sampler of another answer to the same prompt."""
        seed = self.settings.seed
        return Sampler(replace(self.settings, seed=None if seed is None else seed + number))

    def choose(self, logits: Tensor, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Choose the next token.

        Args:
            logits: `[vocabulary]` float32.
            prompt, answer: tokens so far.

        Returns:
            `[1]` int64.

        Raises:
            ValueError: a logit is nan, or `logit_bias` has an unknown token.
        """
        changed = self._changed(logits, prompt, answer)
        if not changed.max().isfinite():
            raise ValueError("the logits are not finite numbers")
        return changed.argmax(-1, keepdim=True) if self.settings.temperature == 0 else self._draw(changed)

    def _changed(self, logits: Tensor, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
        settings, logits = self.settings, logits.clone()
        if settings.repetition_penalty != 1:
            seen = torch.tensor(sorted({*prompt, *answer}), device=logits.device)
            seen = seen[seen < len(logits)]
            old = logits[seen]
            logits[seen] = torch.where(old > 0, old / settings.repetition_penalty, old * settings.repetition_penalty)
        if answer and (settings.presence_penalty or settings.frequency_penalty):
            tokens, counts = torch.tensor(answer, device=logits.device).unique(return_counts=True)
            logits[tokens] -= settings.presence_penalty + settings.frequency_penalty * counts
        if settings.logit_bias:
            wrong = [token for token in settings.logit_bias if not 0 <= token < len(logits)]
            if wrong:  # before it reaches the device, where it would end all requests
                raise ValueError(
                    f"logit_bias: {wrong[0]} is not a token of this model; its tokens are 0 to {len(logits) - 1}."
                )
            tokens = torch.tensor(list(settings.logit_bias), device=logits.device)
            logits[tokens] += torch.tensor(list(settings.logit_bias.values()), device=logits.device)
        return logits

    def _draw(self, logits: Tensor) -> Tensor:
        settings = self.settings
        # The most likely token becomes 0, and a temperature that float32 rounds to 0 does not divide: no nan.
        temperature = max(settings.temperature, torch.finfo(torch.float32).tiny)
        logits, order = ((logits - logits.max()) / temperature).sort(descending=True, stable=True)
        if settings.top_k:
            logits = logits[: min(settings.top_k, len(logits))]
        chances = logits.softmax(-1)
        if settings.top_p < 1:
            before = chances.cumsum(-1) - chances
            before[0] = -1.0  # the most likely token is always kept, whatever top_p is
            chances = chances.masked_fill(before >= settings.top_p, 0.0)
        if settings.min_p:
            chances = chances.masked_fill(chances < settings.min_p * chances[0], 0.0)
        if self._generator is None:
            self._generator = torch.Generator(logits.device)
            _ = self._generator.seed() if settings.seed is None else self._generator.manual_seed(settings.seed)
        # Draws as torch.multinomial does, which on a GPU fails for the whole process if a probability is nan.
        waits = torch.empty_like(chances).exponential_(generator=self._generator)
        return order[(chances / waits).argmax(-1, keepdim=True)]
