"""FAULTS.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def test_every_test_that_faults_md_names_exists():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    named = re.findall(r"`(test_\w+?)(\.\.\.)?`", (TESTS / "FAULTS.md").read_text(encoding="utf-8"))
    missing = [name for name, _ in named if f"def {name}" not in sources]
    assert named and not missing


def test_every_fault_of_installers_and_archives_names_a_test():
    rows = re.findall(
        r"^\| ([IR]\d*) \|(.*)", (TESTS / "FAULTS.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) > 20
    assert [fault for fault, row in rows if "`test_" not in row] == []
