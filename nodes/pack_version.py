"""The version of this pack. Standard library alone: install.py tells it also where torch is missing."""

import re
from pathlib import Path

METADATA = Path(__file__).resolve().parents[1] / "pyproject.toml"


def pack_version() -> str:
    """The version that pyproject.toml states, its only place."""
    found = re.search(r'^version = "([^"]+)"', METADATA.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else "unknown"
