"""The README and the node quote the committed tables, and nothing else."""

import re

import pytest
from evidence import bounds, readme


@pytest.fixture(scope="module")
def text(pack_root):
    return " ".join((pack_root / "README.md").read_text(encoding="utf-8").split())


def test_speed_and_clips_are_those_of_the_tables(text):
    lines = [*readme.speed_lines(), *readme.shape_lines(), readme.order_sentence(), readme.clip_sentence()]
    lines += [readme.model_sentence(), *readme.model_lines()]
    missing = [line for line in lines if line not in text]
    assert not missing, "python tests/evidence readme prints the lines"


def test_no_ratio_is_from_elsewhere(text, pack_root):
    """What several cards give was measured apart."""
    ratio = r"\d+\.\d\d(?=x)"
    made = [*readme.speed_lines(), *readme.shape_lines(), readme.model_sentence(), *readme.model_lines()]
    assert set(re.findall(ratio, text)) == set(re.findall(ratio, " ".join(made)))
    of_cards = text[text.index("Two H200 through") : text.index("Use without ComfyUI")]
    cards = set(re.findall(r"1\.\d\d", of_cards))
    said = (pack_root / "kernels" / "parallel" / "README.md").read_text(encoding="utf-8")
    assert len(cards) == 4 and cards <= set(re.findall(ratio, said))


def test_the_longest_length_is_that_of_the_table(text, pack_root):
    assert readme.longest_sentence() in text
    longest = f"{bounds.results('length')['longest']:,} tokens"
    assert longest in (pack_root / "nodes" / "patch_node.py").read_text(encoding="utf-8")
    assert longest in (pack_root / "web" / "docs" / "VCAttentionPatch.md").read_text(encoding="utf-8")
