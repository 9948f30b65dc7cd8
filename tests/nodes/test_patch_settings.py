import pytest
from comfyui_vc_attention.kernels import VCConfig
from comfyui_vc_attention.nodes.patch_settings import DEFAULT_MIN_TOKENS, PatchSettings, parse_blocks


def test_block_lists():
    assert parse_blocks("0,1, 38-39") == {0, 1, 38, 39}
    assert parse_blocks("") == parse_blocks(" , ") == frozenset()


@pytest.mark.parametrize("text", ["a", "3-1", "1;2", "-1", "1-2-3", "0-9999999999"])
def test_other_text_is_refused_with_its_words(text):
    with pytest.raises(ValueError, match=r"exact_blocks .* got"):
        parse_blocks(text)


def test_range_must_not_be_reversed():
    with pytest.raises(ValueError, match=r"start_percent must not exceed end_percent, got 0\.6 and 0\.5"):
        PatchSettings(VCConfig(), start_percent=0.6, end_percent=0.5)


@pytest.mark.parametrize(
    "asked, by_name",
    [
        ({}, False),
        ({"precision": "auto"}, False),
        ({"precision": "8-bit"}, True),
        ({"kernel": "reference"}, True),
    ],
)
def test_what_is_asked_for_by_name_must_run(asked, by_name):
    assert PatchSettings(VCConfig(), **asked).by_name == by_name


def test_zero_min_tokens_means_the_default():
    assert PatchSettings(VCConfig()).shortest == DEFAULT_MIN_TOKENS
    assert PatchSettings(VCConfig(), min_tokens=1).shortest == 1
    assert PatchSettings(VCConfig(), measured_tokens=2048).shortest == 2048
    assert PatchSettings(VCConfig(), min_tokens=9, measured_tokens=2048).shortest == 9
