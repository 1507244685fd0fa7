"""A model made ready for the policies of a run: some are told of tokens by what is installed in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hf_paged_eviction import make_policy
from hf_paged_eviction.internals import AUTO

from ..errors import UserError
from .budgets import FULL, ORACLE
from .policy_names import ALL, split_name


def prepare_model(model: Any, names: Iterable[str]) -> None:
    """Make it ready for all of these policies; it stays so.

    Args:
        names: policies, as a run names them.

    Raises:
        UserError: one is not for this model.
    """
    for policy in dict.fromkeys(split_name(name)[0].strip() for name in names):
        if policy in (ALL, AUTO, FULL, ORACLE):
            continue
        try:
            make_policy(policy).prepare_model(model)
        except ValueError as error:
            raise UserError(f"policy {policy!r}: {error}") from error
