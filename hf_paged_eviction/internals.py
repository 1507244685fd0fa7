"""What other distributions of this project (the lab, the server) use of the library beyond its public names.

For code of your own the public names are enough: `docs/own_policy.md`. These may change with any version.
"""

from .allocators.share import share_out
from .attention.parts import Part, Read, join, read
from .attention.weights import Attention, Logits
from .disposals.base import Asked, EvictionAction, Held, Site, Surroundings
from .disposals.registry import register_disposal
from .integration.feeding import feed
from .integration.heads import LocalHeads
from .integration.model_rotary import known_rotaries
from .integration.models import is_latent_attention, paged_layers, why_not_ours
from .integration.rotary import Rotary
from .layer.hybrid import paged_part
from .layer.paged import PagedLayer
from .learned.calibration.calibration import fingerprint, model_fingerprint, refuse_other_model
from .naming.files import NamedFiles
from .naming.fitted import FittedFiles, Tensors
from .naming.of_files import quoted
from .naming.tensors import FileKind
from .options.checked import first_tokens
from .parts import map_tensors, persistent
from .policies.checks import check_between, check_count
from .policies.needs import Cutoff
from .precision.base import Codecs, Precision
from .precision.codec import BITS, LEVELS, Alike, Codec, Codes, check_bits
from .queries.attention import HARMLESS, PAGED_EVICTION, paged_eviction_attention
from .queries.bystander import Bystander, OverheardCache
from .queries.observer import Queries
from .ranking import DROP, rank_keys
from .recipes.fit.calibration import DISTANCE, HELD_OUT, Progress, Window, split, usable, using, watched
from .recipes.fit.correlation import spearman
from .recipes.fit.future import Seen, Visit, shows_queries, watch
from .recipes.procedures.probe import REPEAT, check_probed, feed_probe, repeated
from .saved import SavedState, StateDict
from .store.arriving import StateKind
from .store.columns import gather_slots, slot_index
from .store.marks import Marks, Told
from .store.tensors import make_storage
from .table.budget import whole_number
from .table.table import BlockTable

__all__ = [
    "BITS",
    "DISTANCE",
    "DROP",
    "HARMLESS",
    "HELD_OUT",
    "LEVELS",
    "PAGED_EVICTION",
    "REPEAT",
    "Alike",
    "Asked",
    "Attention",
    "BlockTable",
    "Bystander",
    "Codec",
    "Codecs",
    "Codes",
    "Cutoff",
    "EvictionAction",
    "FileKind",
    "FittedFiles",
    "Held",
    "LocalHeads",
    "Logits",
    "Marks",
    "NamedFiles",
    "OverheardCache",
    "PagedLayer",
    "Part",
    "Precision",
    "Progress",
    "Queries",
    "Read",
    "Rotary",
    "SavedState",
    "Seen",
    "Site",
    "StateDict",
    "StateKind",
    "Surroundings",
    "Tensors",
    "Told",
    "Visit",
    "Window",
    "check_between",
    "check_bits",
    "check_count",
    "check_probed",
    "feed",
    "feed_probe",
    "fingerprint",
    "first_tokens",
    "gather_slots",
    "is_latent_attention",
    "join",
    "known_rotaries",
    "make_storage",
    "map_tensors",
    "model_fingerprint",
    "paged_eviction_attention",
    "paged_layers",
    "paged_part",
    "persistent",
    "quoted",
    "rank_keys",
    "read",
    "refuse_other_model",
    "register_disposal",
    "repeated",
    "share_out",
    "shows_queries",
    "slot_index",
    "spearman",
    "split",
    "usable",
    "using",
    "watch",
    "watched",
    "whole_number",
    "why_not_ours",
]
