"""Columns against Python lists: what lies in which slot after every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_paged_eviction.store.columns import Columns

ROWS, HEADS, SLOTS = 3, 2, 6
SHAPES = {"keys": (ROWS, HEADS, SLOTS, 4), "values": (ROWS, HEADS, SLOTS, 2), "positions": (ROWS, 1, SLOTS)}


def made(generator: torch.Generator, tokens: int, rows: int = ROWS) -> dict[str, Tensor]:
    return {
        name: torch.randn(rows, shape[1], tokens, *shape[3:], generator=generator) for name, shape in SHAPES.items()
    }


def lists(columns: Columns) -> Any:
    return [column.tolist() for column in columns.tensors.values()]


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_every_call_does_what_lists_do(fixed: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    columns = Columns(fixed)
    columns.use(made(generator, SLOTS))
    addresses = [column.data_ptr() for column in columns.tensors.values()]
    slow = lists(columns)

    new = made(generator, 2)
    columns.append(3, new)
    for column, states in zip(slow, new.values(), strict=True):
        for row, sets in enumerate(column):
            for one, slots in enumerate(sets):
                slots[3:5] = states[row, one].tolist()
    assert lists(columns) == slow

    slot = torch.randint(SLOTS, (ROWS, HEADS, 1), generator=generator)
    comes = torch.rand(ROWS, 1, 1, generator=generator) < 0.5
    for where in (comes, None):
        new = made(generator, 1)
        columns.overwrite(slot, new, where)
        for column, states in zip(slow, new.values(), strict=True):
            for row, sets in enumerate(column):
                for one, slots in enumerate(sets):
                    if where is None or where[row]:
                        slots[slot[row, one]] = states[row, one, 0].tolist()
        assert lists(columns) == slow

    order = torch.stack([torch.randperm(4, generator=generator) for _ in range(ROWS)])[:, None]
    columns.reorder(order)
    slow = [
        [[[slots[at] for at in order[row, 0]] + slots[4:] for slots in sets] for row, sets in enumerate(column)]
        for column in slow
    ]
    assert lists(columns) == slow

    columns.map_rows(lambda states: states[[2, 2, 0]])
    slow = [[column[row] for row in (2, 2, 0)] for column in slow]
    assert lists(columns) == slow
    assert not fixed or addresses == [column.data_ptr() for column in columns.tensors.values()]

    columns.resize(SLOTS + 3, 5)
    assert [[[slots[:5] for slots in sets] for sets in column] for column in slow] == [
        states.tolist() for states in columns.first(5).values()
    ]
    assert columns.shape == (ROWS, HEADS, SLOTS + 3)

    chosen = torch.randint(9, (ROWS, 1, SLOTS), generator=generator)
    more = made(generator, 4)
    sources = {name: torch.cat([held, more[name]], dim=2) for name, held in columns.first(5).items()}
    columns.take(sources, chosen, views=True)
    for name, source in sources.items():
        column = columns[name]
        for row in range(ROWS):
            assert column[row].tolist() == [[slots[at] for at in chosen[row, 0]] for slots in source[row].tolist()]
    assert columns.bytes == sum(4 * states.numel() for states in columns.tensors.values())


@pytest.mark.parametrize("sets", [1, HEADS])
def test_compiled_code_writes_the_same(sets: int) -> None:
    generator = torch.Generator().manual_seed(0)
    eager, compiled = Columns(), Columns()
    eager.use({name: states for name, states in made(generator, SLOTS).items() if name != "positions"})
    compiled.use({name: column.clone() for name, column in eager.tensors.items()})
    slot, new = torch.randint(SLOTS, (ROWS, sets), generator=generator), made(generator, 1)
    del new["positions"]
    eager.overwrite(slot[..., None], new)
    compiled.write(slot, new)
    assert lists(eager) == lists(compiled)
