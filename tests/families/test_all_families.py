"""`verify` over every family that the installed transformers can build: `make test-families`, some minutes."""

import pytest

from families.building import UnbuildableError, build
from families.listing import Family, families
from families.outcomes import Outcome, outcome_of
from families.table import PAGE, words_of
from families.unbuildable import UNBUILDABLE
from hf_paged_eviction import verify
from rotation_checks import look

pytestmark = pytest.mark.families
#: What was found before.
LISTED = words_of(PAGE.read_text("utf-8"))


@pytest.mark.parametrize("family", families(), ids=str)
def test_exact_or_refused(family: Family) -> None:
    reason = UNBUILDABLE.get(str(family))
    try:
        model = build(family)
    except UnbuildableError as error:
        Outcome(str(family), "", "not built", (str(error),)).save()
        assert reason is not None, f"a family that cannot be built, and is not known for it: {error}"
        assert reason in str(error)
        pytest.skip(f"cannot be built: {reason}")
    assert reason is None or "library" in reason, "this family can be built: take it out of unbuildable.py"
    try:
        report = verify(model)
    except TypeError as error:
        assert "no token embeddings" in str(error)
        Outcome(str(family), type(model).__name__, "not covered", (str(error),)).save()
        return
    outcome = outcome_of(str(family), report)
    outcome.save()
    assert report.ok, str(report)
    assert all(verdict.ok for verdict in look(model)), look(model)
    if LISTED.get(str(family)) == "exact":
        assert outcome.word == "exact", f"the page of families says exact. If it cannot be, change that line.\n{report}"


def test_known_families_exist() -> None:
    assert set(UNBUILDABLE) <= {str(family) for family in families()}
