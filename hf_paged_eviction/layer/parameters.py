"""What layers are made from."""

from dataclasses import dataclass, field

from ..allocators.limits import Limits
from ..disposals import Disposal, Drop, EvictionAction
from ..integration.heads import WHOLE, LocalHeads
from ..integration.rotary import Rotary
from ..masks.padding import Padding
from ..policies import EvictionPolicy
from ..policies.needs import Heads
from ..precision.codec import Codec
from .memory_plan import MemoryPlan


@dataclass(frozen=True)
class Common:
    """What all paged layers of a cache have in common.

    Attributes:
        policy: scores tokens.
        heads: "shared" = all KV heads of a layer evict the same tokens, "separate" = each its own.
        padding: the pads of the batch.
        masks_itself: the model's own mask does not fit, because layers hold different numbers of tokens.
        static: take single tokens without a branch or a counter, see `Plan`. `update` then returns the whole
            storage for a single token; the mask hides unused slots.
        disposal: what happens to evicted tokens.
        limits: how many tokens each layer of the cache may hold; None = layers are not part of a cache.
        memory: turns a budget in bytes into tokens; None if the budget is not in bytes.
    """

    policy: EvictionPolicy
    heads: Heads = "shared"
    padding: Padding = field(default_factory=Padding)
    masks_itself: bool = False
    static: bool = False
    disposal: Disposal = field(default_factory=Drop)
    limits: Limits | None = None
    memory: MemoryPlan | None = None


@dataclass(frozen=True)
class Place:
    """One layer of the model.

    Attributes:
        layer_idx: index in the model.
        local_heads: the KV heads of the layer that this process holds.
        rotary: rotation of the keys, if the policy needs it; None if the layer does not rotate.
        rerotation: closes the gaps that eviction leaves, see `table.gaps`; None = keys keep their positions in the
            text.
        codecs: codecs of keys and of values, for `bits=`.
        previous: see `Site`.
    """

    layer_idx: int = 0
    local_heads: LocalHeads = WHOLE
    rotary: Rotary | None = None
    rerotation: Rotary | None = None
    codecs: tuple[Codec, Codec] | None = None
    previous: EvictionAction | None = None
