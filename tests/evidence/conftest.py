"""Make this folder importable as ``evidence``: in pytest's importlib mode tests cannot see neighbours."""

import importlib.util
from pathlib import Path

spec = importlib.util.spec_from_file_location("evidence_packages", Path(__file__).parent / "packages.py")
packages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(packages)
packages.alias_folders()
