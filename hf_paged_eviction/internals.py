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
from .integration.weights import (  # plan finds profiles; verify takes wrapped models, as prepare does
    register_checkpoint,
    without_parallel,
)
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
from .policies.base import Statistics  # what a policy makes of it
from .policies.checks import check_between, check_flag
from .policies.needs import Heads
from .policies.registry import POLICIES  # as ALLOCATORS
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
from .ranking import DROP, KEEP, rank_keys
from .recipes.probe import REPEAT, check_probed, feed_probe, probe_context  # kvzip within a batch
from .requests.layout import Layout, Shares
from .requests.live_request import LiveRequest, alone, log_failure
from .requests.pages import ALL, Kept, Pages, grown
from .requests.setup import Setup
from .requests.step import Entry, Step
from .requests.table import RequestTable
from .store.columns import Columns, gather_slots, slot_index
from .store.exact import Exact, RowStatistics
from .store.store import Store
from .store.tensors import byte_count
from .table.bounds import spans_in
from .table.budget import BlockBudget, whole_number
from .table.spans import (
    Spans,  # what --protect comes to
    read_spans,
)
from .table.table import BlockTable
from .tensors.parts import map_tensors, persistent
from .tensors.saved import StateDict, in_range

#: Taken from where they stand: this module loads torch, and `--help`, `score` and `report` do without it.
WITHOUT_TORCH = {
    "naming": ("sizes",),  # bytes and shares as people type them
    "naming.policies": ("POLICY_MODULES",),
    "naming.sizes": ("readable_bytes",),
    "options.cache_options": ("BLOCK_SIZE", "Typed", "budget_of_text", "read_bits", "read_size", "typed_options"),
    "table.budget": ("BlockBudget",),  # the smallest legal budget
    "table.spans": ("read_protect",),
}
