"""Names that the harness, the lab, serving and the plugin for vLLM use beyond the public ones.

Your own code needs the public names only, see `docs/own_policy.md`; these names may change with any version. The
harness uses the names on lines with a reason, and a test checks that it uses no others. The other packages use the
rest.
"""

from .allocators import (
    BudgetAllocator,
    FixedAllocator,
    LayerAllocator,
    Uniform,  # a policy name without an allocator
)
from .allocators.registry import ALLOCATORS  # which names stand before a file; what a plugin registers
from .allocators.share import share_out
from .attention.parts import Extra, Part, Read, join, read
from .attention.weights import Attention, Logits  # what a policy is told of one prefill, for many caches
from .disposals import Drop
from .disposals.base import AttentionCall, DisposalContext, EvictionAction, Held, Site
from .disposals.registry import DISPOSALS, register_disposal  # as ALLOCATORS
from .integration.cache_argument import (  # models name it two ways
    CACHE_ARGUMENT,
    cache_argument,
    cache_kwargs,
    unwrapped,
)
from .integration.contract import in_words
from .integration.contract import moved as moved_parts
from .integration.feeding import feed  # one forward with a padding mask, in any release
from .integration.generation import (  # what a call of generate runs with
    ANSWERS_AS_TOKENS,
    CHANGES_PROMPT,
    generate_settings,
)
from .integration.heads import LocalHeads
from .integration.implementations import Implementations, using
from .integration.kept_state import forget_last_text
from .integration.model_rotary import head_dim
from .integration.models import (  # which attention a model may take
    is_latent_attention,
    mixes_heads,
    paged_layers,
    why_not_ours,
)
from .integration.rotary import Rotary
from .integration.weights import without_parallel  # verify takes wrapped models, as prepare does
from .integration.window import trained_window  # a note where prompts are longer
from .layer.overflow import shrink as shrink_layer  # evict what a smaller budget of one layer leaves no room for
from .layer.paged import PagedLayer  # what a layer holds; replaying one prefill into many caches
from .layer.scores import encode  # single tokens of few bits
from .learned.calibration import (
    fingerprint,
    model_fingerprint,
    refuse_other_model,
)
from .learned.lookup import profiles_of_shape  # if there is none, no weights have to be read
from .masks.visible import visible, visible_one_behind_the_other
from .naming.digests import (
    content_digest,
    file_digest,  # rows carry the digest of what decides them
)
from .naming.files import whole_file
from .naming.fitted import FittedFiles, Tensors
from .naming.sizes import parse_bytes
from .naming.tensors import FileKind
from .options.cache_options import read_bits, typed_options
from .options.checked import first_tokens, reads_profile  # who gets --profile
from .options.defaults import AUTO, NO_PROFILE, UNKNOWN_WEIGHTS, Default  # tables say what a default came to
from .policies import QueryCount
from .policies.base import Statistics  # what a policy makes of it
from .policies.checks import check_between, check_flag
from .policies.needs import Heads
from .policies.registry import POLICIES  # as ALLOCATORS
from .policies.scorer import Scorer
from .precision import fused  # attention on codes in pages
from .precision.base import Codecs, Precision
from .precision.codec import BITS, LEVELS, Codec, Codes, check_bits, packed_width
from .precision.few_bits import FewBits
from .precision.in_codes import InCodes
from .preparing.fitting import HELD_OUT, spearman, text_facts
from .preparing.future import DISTANCE, Seen, overheard, usable, watch
from .preparing.passages import documentation  # what is read to fit something
from .queries.arguments import HARMLESS, check_understood  # arguments that may be left out
from .queries.attention import (  # the attention implementation that shows queries
    PAGED_EVICTION,
    paged_eviction_attention,
    shown_queries,
)
from .queries.handover import KeyOwner, hand_over
from .queries.hook import HookedCache, QueryHook  # queries of a model with a plain cache
from .queries.observer import Observe, Observer, Queries, fold  # queries of one prefill for many caches
from .ranking import DROP, KEEP, best_within, rank_keys
from .recipes.probe import REPEAT, check_probed, feed_probe, probe_context  # kvzip within a batch
from .requests.layout import Layout, Shares
from .requests.live_request import LiveRequest, alone, log_failure
from .requests.pages import ALL, Kept, Pages, grown
from .requests.setup import Setup
from .requests.step import Entry, Step
from .requests.table import RequestTable
from .store.arriving import StateKind
from .store.columns import Columns, gather_slots, slot_index
from .store.exact import Exact, RowStatistics
from .store.store import Store
from .store.tensors import byte_count
from .table.bounds import bounds_of, inside, spans_in
from .table.budget import BlockBudget, whole_number
from .table.spans import (
    Spans,  # what --protect comes to
    read_spans,
)
from .table.table import BlockTable
from .tensors.parts import map_tensors, persistent
from .tensors.saved import StateDict, in_range, restored

__all__ = [
    "ALL",
    "ALLOCATORS",
    "ANSWERS_AS_TOKENS",
    "AUTO",
    "BITS",
    "CACHE_ARGUMENT",
    "CHANGES_PROMPT",
    "DISPOSALS",
    "DISTANCE",
    "DROP",
    "HARMLESS",
    "HELD_OUT",
    "KEEP",
    "LEVELS",
    "NO_PROFILE",
    "PAGED_EVICTION",
    "POLICIES",
    "REPEAT",
    "UNKNOWN_WEIGHTS",
    "Attention",
    "AttentionCall",
    "BlockBudget",
    "BlockTable",
    "BudgetAllocator",
    "Codec",
    "Codecs",
    "Codes",
    "Columns",
    "Default",
    "DisposalContext",
    "Drop",
    "Entry",
    "EvictionAction",
    "Exact",
    "Extra",
    "FewBits",
    "FileKind",
    "FittedFiles",
    "FixedAllocator",
    "Heads",
    "Held",
    "HookedCache",
    "Implementations",
    "InCodes",
    "Kept",
    "KeyOwner",
    "LayerAllocator",
    "Layout",
    "LiveRequest",
    "LocalHeads",
    "Logits",
    "Observe",
    "Observer",
    "PagedLayer",
    "Pages",
    "Part",
    "Precision",
    "Queries",
    "QueryCount",
    "QueryHook",
    "Read",
    "RequestTable",
    "Rotary",
    "RowStatistics",
    "Scorer",
    "Seen",
    "Setup",
    "Shares",
    "Site",
    "Spans",
    "StateDict",
    "StateKind",
    "Statistics",
    "Step",
    "Store",
    "Tensors",
    "Uniform",
    "alone",
    "best_within",
    "bounds_of",
    "byte_count",
    "cache_argument",
    "cache_kwargs",
    "check_between",
    "check_bits",
    "check_flag",
    "check_probed",
    "check_understood",
    "content_digest",
    "documentation",
    "encode",
    "feed",
    "feed_probe",
    "file_digest",
    "fingerprint",
    "first_tokens",
    "fold",
    "forget_last_text",
    "fused",
    "gather_slots",
    "generate_settings",
    "grown",
    "hand_over",
    "head_dim",
    "in_range",
    "in_words",
    "inside",
    "is_latent_attention",
    "join",
    "log_failure",
    "map_tensors",
    "mixes_heads",
    "model_fingerprint",
    "moved_parts",
    "overheard",
    "packed_width",
    "paged_eviction_attention",
    "paged_layers",
    "parse_bytes",
    "persistent",
    "probe_context",
    "profiles_of_shape",
    "rank_keys",
    "read",
    "read_bits",
    "read_spans",
    "reads_profile",
    "refuse_other_model",
    "register_disposal",
    "restored",
    "share_out",
    "shown_queries",
    "shrink_layer",
    "slot_index",
    "spans_in",
    "spearman",
    "text_facts",
    "trained_window",
    "typed_options",
    "unwrapped",
    "usable",
    "using",
    "visible",
    "visible_one_behind_the_other",
    "watch",
    "whole_file",
    "whole_number",
    "why_not_ours",
    "without_parallel",
]

#: Taken from where they stand: this module loads torch, and `--help`, `score` and `report` do without it.
WITHOUT_TORCH = {
    "naming": ("sizes",),  # bytes and shares as people type them
    "naming.policies": ("POLICY_MODULES",),
    "naming.sizes": ("readable_bytes",),
    "options.cache_options": ("BLOCK_SIZE", "Typed", "budget_of_text", "read_bits", "read_size", "typed_options"),
    "table.budget": ("BlockBudget",),  # the smallest legal budget
    "table.spans": ("read_protect",),
}
