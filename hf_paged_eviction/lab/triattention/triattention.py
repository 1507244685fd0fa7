"""TriAttention, arXiv 2604.04921: the score."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...learned.calibration.calibration import refuse_other_model
from ...policies.base import EvictionPolicy, ScoreContext
from ...policies.checks import check_count
from ...policies.needs import Needs
from ...policies.registry import register_policy
from .centres import Centres, load_centres


@register_policy("triattention")
@dataclass(frozen=True)
class TriAttention(EvictionPolicy):
    r"""How well a key fits where the model's queries lie, at the distances from which it will be asked for.

    .. math::

        s_t = \max_{h} z_t \Bigl( \operatorname{mean}_{\delta \in \{1, 2, 4, \ldots\}} R_{n + \delta} \bar q_h \cdot k_t
        + \sum_f \bigl( \overline{|q_{h,f}|} - |\bar q_{h,f}| \bigr) |k_{t,f}| \Bigr)

    For each query head `h` of the group: the mean query before rotation, turned to some positions after the `n` tokens
    seen, times the key; and, for what the mean does not say, the length of each pair of channels `f` of the key times
    the mean length of that pair of the queries less the length of their mean. `z` brings the tokens of each row and
    query head to mean 0 and deviation 1. Queries are looked at once, when the file is made; in use the score needs keys
    alone.

    This is the authors' per-layer, per-head mode. They keep the whole prompt and decide in decode every 128 tokens;
    here the prompt is decided on, too.

    Args:
        file: what `save_centres` wrote.
        farthest: the largest distance, of powers of two.

    Raises:
        ValueError: there is no such file, or a number is out of range. By `check_model`: it belongs to another model.
    """

    file: str
    farthest: int = 65536

    of_file: ClassVar[bool] = True
    paper: ClassVar[str | None] = "2604.04921"
    needs = Needs(heads="separate", absolute_noise=True, common_unit=True, rotary=True, supports_mla=False)

    def __post_init__(self) -> None:
        check_count("farthest", self.farthest, at_least=1)
        _ = self.centres  # read at once, so that a file that is not there is an error here

    @cached_property
    def centres(self) -> Centres:
        """What the file says."""
        return load_centres(self.file)

    def check_model(self, config: Any) -> None:
        remedy = "Find those of this model with `find_centres`."
        refuse_other_model(self.centres.model, config, "These query centres were found for", remedy)

    def score(self, context: ScoreContext) -> Tensor:
        if context.rotary is None or context.layer_idx not in self.centres.layers:
            raise ValueError(
                f"{self.label!r} knows nothing of layer {context.layer_idx}, which does not rotate its keys."
            )
        keys, own = context.keys.float(), slice(context.first_head, context.first_head + context.keys.shape[1])
        known = self.centres.layers[context.layer_idx]
        mean, length = (known[name][own].to(keys.device) for name in ("mean", "length"))  # [H, G, ...]
        distances = 2 ** torch.arange(self.farthest.bit_length(), device=keys.device)
        ahead = context.rotary.rotate_mean(mean, context.seen[:, None, None, None] + distances)  # [B, H, G, D]
        # Both channels of a pair say the same of it.
        rest = (length - context.rotary.pair_lengths(mean)) * context.rotary.stretch(keys.device) / 2
        scores = ahead @ keys.mT + rest @ context.rotary.pair_lengths(keys).mT
        return _standardised(scores, context.valid[:, :, None]).amax(2)


def _standardised(scores: Tensor, valid: Tensor) -> Tensor:
    """To mean 0 and deviation 1 over the tokens."""
    count = valid.sum(-1, keepdim=True).clamp_min(1)
    around = (scores - (scores * valid).sum(-1, keepdim=True) / count).masked_fill(~valid, 0.0)
    return around / (around.square().sum(-1, keepdim=True) / count).sqrt().clamp_min(1e-6)
