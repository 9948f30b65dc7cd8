"""The README and the node quote the committed tables, and nothing else."""

import re

import pytest
from evidence import bounds, readme


@pytest.fixture(scope="module")
def text(pack_root):
    return " ".join((pack_root / "README.md").read_text(encoding="utf-8").split())


def test_speed_and_clips_are_those_of_the_tables(text):
    lines = [*readme.speed_lines(), *readme.shape_sentences(), readme.clip_sentence()]
    missing = [line for line in lines if line not in text]
    assert not missing, "python tests/evidence readme prints the lines"


def test_other_ratios_are_in_the_notes(text, pack_root):
    """What whole models and several cards give was measured apart."""
    places = ("tests/bench/NOTES.md", "kernels/parallel/README.md")
    notes = " ".join((pack_root / place).read_text(encoding="utf-8") for place in places)
    notes += " ".join(readme.speed_lines() + readme.shape_sentences())
    ratios = set(re.findall(r"\d+\.\d\d(?=x)", text))
    assert len(ratios) > 5 and not {ratio for ratio in ratios if ratio not in notes}


def test_the_longest_length_is_that_of_the_table(text, pack_root):
    assert readme.longest_sentence() in text
    longest = f"{bounds.results('length')['longest']:,} tokens"
    assert longest in (pack_root / "nodes" / "patch_node.py").read_text(encoding="utf-8")
    assert longest in (pack_root / "web" / "docs" / "VCAttentionPatch.md").read_text(encoding="utf-8")
