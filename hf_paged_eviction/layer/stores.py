"""Which store a layer keeps its tokens in."""

from ..precision.codec import Codec
from ..precision.coded import CodedStore
from ..store.columns import Columns
from ..store.ragged import RaggedColumns
from ..store.rerotation import Rerotation
from ..store.store import Store
from ..table.budget import BlockBudget


def make_store(
    budget: BlockBudget,
    fixed: bool,
    rerotation: Rerotation | None,
    codecs: tuple[Codec, Codec] | None,
    separate: bool,
    unequal: bool,
) -> Store:
    """The store of a layer: `fixed` for compiled steps, coded where there are codecs; `separate`: see `CodedStore`.

    With `unequal` rows or heads hold different numbers of tokens: then nothing is padded, unless tokens are turned.
    """
    columns = RaggedColumns if unequal and rerotation is None else Columns
    if codecs is not None:
        return CodedStore(codecs, budget.block_size, budget.protected, fixed, separate, columns)
    return Store(rerotation, fixed, columns)
