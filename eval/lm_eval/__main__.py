"""The command line of lm-evaluation-harness, with the model type `hf-paged-eviction`."""

from __future__ import annotations

import sys

from lm_eval.__main__ import cli_evaluate

from ..errors import UserError


def main() -> None:
    """Run `lm-eval` on the arguments of this process."""
    try:
        cli_evaluate()
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
