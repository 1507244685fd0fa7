"""All policies that read no profile, for rooms whose options the fuzz draws with each of them."""

import pytest

from hf_paged_eviction import available_policies
from hf_paged_eviction.options.checked import reads_profile

#: One of each kind of score.
KINDS = ("paged_eviction", "keydiff", "random", "h2o", "snapkv", "lazy_eviction", "cake", "r_kv")
#: Their names.
NAMES = tuple(name for name in available_policies() if not reads_profile(name))
#: The others run under `--all-cases`.
POLICIES = [pytest.param(name, marks=() if name in KINDS else pytest.mark.all_cases) for name in NAMES]
