"""Gates for the policies of a run: a policy `gate:FILE` needs them in the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import UserError
from .policy_names import split_name

#: Digests of what was installed here, by model.
_INSTALLED: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def install_named(model: Any, names: Iterable[str]) -> None:
    """Install the gates of all policies that ask for some, each once; they stay for as long as the model is there.

    Args:
        names: policies, as a run names them.

    Raises:
        UserError: they belong to another model.
    """
    policies = [split_name(name)[0].strip() for name in names]
    files = {policy for policy in policies if "gate" in policy}
    if not files:
        return
    from hf_paged_eviction import install_gates, make_policy
    from hf_paged_eviction.policies import Gate

    gates = {policy.network.digest: policy for policy in map(make_policy, files) if isinstance(policy, Gate)}
    there = _INSTALLED.setdefault(model, set())
    for digest in gates.keys() - there:
        policy = gates[digest]
        try:
            install_gates(model, policy.network)
            there.add(digest)
        except ValueError as error:
            raise UserError(f"policy {policy.label!r}: {error}") from error
