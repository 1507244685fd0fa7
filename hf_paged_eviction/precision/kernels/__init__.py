"""Triton kernels for attention of single queries on codes. `launching` runs them one after the other.

The first computes what does not depend on codes: the products of queries with the mean key, which turns with the
position, and the queries with mixed channels. The second reads the slots of one row and KV head in parallel parts. The
third joins the parts with the tokens in `Exact` and the sinks, weighted by their sums of exponentials. Sums are in
float32; products take as many passes of fewer bits as the dtype of the queries needs.
"""

from .alike import prepare
from .joining import join_parts
from .parts import read_part
from .planes import plane_count

__all__ = ["join_parts", "plane_count", "prepare", "read_part"]
