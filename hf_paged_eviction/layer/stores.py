"""Make the store of a layer."""

from ..integration.rotary import Rotary
from ..precision.codec import Codec
from ..precision.coded import CodedStore
from ..store.columns import Columns
from ..store.marks import Marks
from ..store.ragged import RaggedColumns
from ..store.store import Store
from ..table.budget import BlockBudget


def make_store(
    budget: BlockBudget,
    fixed: bool,
    rerotation: Rotary | None,
    codecs: tuple[Codec, Codec] | None,
    separate: bool,
    unequal: bool,
    marks: Marks | None,
) -> Store:
    """Make the store of a layer: `fixed` for compiled steps, a `CodedStore` if there are codecs; `marks`: see `Store`.

    `unequal`: rows or heads hold different numbers of tokens, so columns are not padded, unless keys are rotated again.
    """
    columns = RaggedColumns if unequal and rerotation is None else Columns
    if codecs is not None:
        return CodedStore(codecs, budget.block_size, budget.protected, fixed, separate, columns, marks)
    return Store(rerotation, fixed, columns, marks)
