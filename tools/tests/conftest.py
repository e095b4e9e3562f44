"""The tools are scripts, not an installed package: tests find them as the scripts do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "bundle"))
