"""Gates for the policies of a run: a policy `gate:FILE` needs them in the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .errors import UserError
from .policy_names import split_name


def install_named(model: Any, names: Iterable[str]) -> None:
    """Install the gates of all policies that ask for some; they stay for as long as the model is there.

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
    for policy in gates.values():
        try:
            install_gates(model, policy.network)
        except ValueError as error:
            raise UserError(f"policy {policy.label!r}: {error}") from error
