"""Vector norms in float32, without a float32 copy of the cache."""

import torch
from torch import Tensor


def l2_norm(states: Tensor) -> Tensor:
    """`[..., tokens, dim]` in any dtype -> `[..., tokens]` float32."""
    wide = torch.promote_types(states.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(states, dim=-1, dtype=wide)
    return norm.float()
