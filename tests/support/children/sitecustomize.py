"""Python imports this when it starts, because the folder is on the PYTHONPATH of processes that tests start."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import homes

sys.path.pop()
homes.guard()
