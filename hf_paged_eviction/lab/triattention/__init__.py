"""TriAttention (arXiv 2604.04921): where the model's queries lie before rotation, found once, says which keys count."""

from .centres import Centres, find_centres, load_centres, save_centres
from .triattention import TriAttention

__all__ = ["Centres", "TriAttention", "find_centres", "load_centres", "save_centres"]
