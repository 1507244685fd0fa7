"""Scale the scores of different policies to a common scale."""

from torch import Tensor


def standardise(scores: Tensor, valid: Tensor) -> Tensor:
    """Shift and scale the scores of each row and head to mean 0 and mean absolute deviation 1.

    The means are over the valid tokens with finite scores. The mean absolute deviation is used instead of the standard
    deviation, because attention has a few enormous values, whose squares would hide all other differences. Infinite
    scores do not change; if all scores are equal, they become 0.

    Args:
        scores: `[batch, kv_heads, tokens]`, pads may hold anything.
        valid: same shape, bool.
    """
    usable = valid & scores.isfinite()
    count = usable.sum(-1, keepdim=True).clamp_min(1)
    centred = scores - scores.where(usable, 0.0).sum(-1, keepdim=True) / count
    distance = centred.abs().where(usable, 0.0).sum(-1, keepdim=True) / count
    # Rounding errors of equal scores are no distance.
    size = scores.abs().where(usable, 0.0).sum(-1, keepdim=True) / count
    equal = distance <= 1e-6 * size
    scaled = centred / distance.where(~equal, 1.0)
    return scaled.masked_fill(equal & usable, 0.0)
