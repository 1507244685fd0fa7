"""Budget allocators: how many tokens each layer and head may hold. One file each."""

from .ada_kv import AdaKV
from .base import BudgetAllocator, FixedAllocator, HeadAllocator, LayerAllocator
from .cake import Cake
from .d2o import D2O
from .first_prompt import FirstPrompt
from .given import Given
from .heads import Heads
from .pyramid import Pyramid
from .registry import available_allocators, make_allocator, register_allocator
from .share import share_out
from .threshold import Global
from .uniform import Uniform

__all__ = [
    "D2O",
    "AdaKV",
    "BudgetAllocator",
    "Cake",
    "FirstPrompt",
    "FixedAllocator",
    "Given",
    "Global",
    "HeadAllocator",
    "Heads",
    "LayerAllocator",
    "Pyramid",
    "Uniform",
    "available_allocators",
    "make_allocator",
    "register_allocator",
    "share_out",
]
