"""The state of one layer, and how tokens get there."""

import torch
from torch import Tensor

from hf_paged_eviction.internals import AttentionCall, BlockTable, Extra, Held, Site

from ..actions import StatefulAction
from .kernels import Kernels, LayerKernels
from .state import FoldedState, read_state


class FoldAction(StatefulAction[FoldedState]):
    """Adds every token that leaves to sums of constant size, which every later query reads.

    Args:
        kernels: of the model.
        site: the layer.

    Raises:
        ValueError: there are no kernels for this layer.
    """

    reads = True

    def __init__(self, kernels: Kernels, site: Site) -> None:
        self.kernels, self.site = kernels, site
        if site.layer_idx not in kernels.layers:
            raise ValueError(
                f"These kernels were fitted to the layers {sorted(kernels.layers)}, and this model evicts in layer "
                f"{site.layer_idx}. Fit some to this model with `{kernels.command}`."
            )
        self._maps: LayerKernels | None = None

    # ---- life -----------------------------------------------------------------------------------------------------

    def empty(self, table: BlockTable) -> FoldedState:
        """See `StatefulAction.empty`.

        Raises:
            ValueError: the kernels are those of a layer of another shape.
        """
        keys, values = self.site.store.tensors[:2]
        rows, heads = keys.shape[:2]
        self._maps = maps = self._placed(heads, keys.shape[-1], table.device)
        sums = torch.zeros(rows, heads, maps.rank, values.shape[-1], device=table.device)
        mass = torch.zeros(rows, heads, maps.rank, device=table.device)
        return FoldedState(sums, mass, self.kernels.digest)

    def _placed(self, heads: int, dim: int, device: torch.device) -> LayerKernels:
        """The maps of the heads that are here, where their keys are."""
        whole = self.kernels.layers[self.site.layer_idx]
        first = self.site.local_heads.first_head(heads)
        if first + heads > whole.kv_heads or dim != whole.key_dim:
            raise ValueError(
                f"These kernels were fitted to a layer {self.site.layer_idx} with {whole.kv_heads} KV heads of "
                f"{whole.key_dim} dimensions; this one has {first + heads} or more of {dim}."
            )
        return whole.of_heads(first, heads).to(device)

    # ---- in and out -----------------------------------------------------------------------------------------------

    def evict_token(self, leaving: Held, slots: Tensor | None) -> None:
        """Add to the sums what leaves. Where nothing does, keys and values may be anything."""
        if self._maps is None:
            raise RuntimeError("The cache is empty: run a forward first.")
        state, self.any = self.state, True
        stays = (leaving.positions < 0)[..., None]
        with torch.no_grad(), torch.autocast(leaving.keys.device.type, enabled=False):
            features = self._maps.of_keys(leaving.keys).masked_fill(stays, 0.0)
            state.values.add_(features.mT @ leaving.values.float().masked_fill(stays, 0.0))
            state.mass.add_(features.sum(2))

    def extra_attention(self, call: AttentionCall) -> Extra | None:
        """See `EvictionAction.extra_attention`."""
        if not self.any or self._maps is None:
            return None
        query = call.queries.query
        with torch.autocast(query.device.type, enabled=False):
            return Extra([read_state(self._maps.of_queries(query), self.state.values, self.state.mass)])
