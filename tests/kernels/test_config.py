"""Which recipe a config means: the table of (expcast, value_format) at 8 bits, and the refusals."""

import pytest
from comfyui_vc_attention.kernels import VCConfig
from comfyui_vc_attention.kernels.config import Recipe, resolve_recipe

ALL = ("int8_int8", "int8_fp8", "fp8_fp8", "nvfp4")
FAST, OTHER = (9, 0), (12, 0)

TABLE = [
    # expcast, value_format, card, numerics, expcast in the recipe
    ("auto", "auto", FAST, "int8_fp8", True),
    ("auto", "auto", (10, 3), "int8_fp8", True),
    ("auto", "auto", OTHER, "int8_int8", False),
    ("auto", "auto", None, "int8_int8", False),
    ("auto", "fp8", FAST, "int8_fp8", True),
    ("auto", "fp8", OTHER, "int8_fp8", False),
    ("auto", "int8", FAST, "int8_int8", False),
    ("off", "int8", FAST, "int8_int8", False),
    ("off", "auto", FAST, "int8_int8", False),
    ("on", "auto", OTHER, "int8_fp8", True),
    ("on", "fp8", OTHER, "int8_fp8", True),
    ("off", "fp8", FAST, "int8_fp8", False),
]


@pytest.mark.parametrize(("expcast", "value_format", "card", "numerics", "writes_expcast"), TABLE)
def test_table_of_8_bit_recipes(expcast, value_format, card, numerics, writes_expcast):
    config = VCConfig(expcast=expcast, value_format=value_format)
    assert resolve_recipe(config, ALL, card, exact=False) == Recipe(numerics, writes_expcast)


def test_auto_follows_a_kernel_chosen_by_name():
    assert resolve_recipe(VCConfig(), ("int8_int8",), FAST, exact=True).numerics == "int8_int8"
    assert resolve_recipe(VCConfig(), ("int8_int8",), FAST, exact=False) is None
    assert resolve_recipe(VCConfig(), ("fp8_fp8",), OTHER, exact=True) == Recipe("fp8_fp8", False)


def test_a_kernel_chosen_by_name_does_not_override_an_explicit_choice():
    assert resolve_recipe(VCConfig(expcast="on"), ("int8_int8",), FAST, exact=True) is None
    assert resolve_recipe(VCConfig(value_format="fp8"), ("int8_int8",), FAST, exact=True) is None
    assert resolve_recipe(VCConfig(expcast="off"), ("int8_fp8",), FAST, exact=True) is None


@pytest.mark.parametrize("numerics", ALL)
def test_means_left_open_are_for_all_but_fp8_values(numerics):
    """Also where the kernel's numerics decide what the values are."""
    precision = "4-bit" if numerics == "nvfp4" else "8-bit"
    for demean, expected in ((None, numerics in ("int8_int8", "nvfp4")), (True, True), (False, False)):
        recipe = resolve_recipe(VCConfig(precision, demean=demean), (numerics,), None, exact=True)
        assert (recipe.numerics, recipe.demean) == (numerics, expected)


def test_4_bit_does_not_rotate_unless_asked():
    recipe = resolve_recipe(VCConfig("4-bit"), ALL, OTHER, False)
    assert recipe == Recipe("nvfp4", smooth_q=True)
    assert not resolve_recipe(VCConfig("4-bit", rotate_qk=False), ALL, OTHER, False).rotate_qk
    assert not resolve_recipe(VCConfig(rotate_qk=False), ALL, OTHER, False).rotate_qk


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"expcast": "on", "value_format": "int8"}, "set value_format to auto or fp8, got 'int8'"),
        ({"precision": "4-bit", "expcast": "on"}, "4-bit has one recipe"),
        ({"precision": "4-bit", "value_format": "fp8"}, "4-bit has one recipe"),
        ({"precision": "16-bit"}, "precision must be one of 8-bit, 4-bit, got '16-bit'"),
        ({"expcast": "yes"}, "expcast must be one of"),
        ({"value_format": "e5m2"}, "value_format must be one of"),
        ({"clusters": 257}, "clusters must be 1 to 256, got 257"),
        ({"clusters": 0}, "clusters must be 1 to 256, got 0"),
        ({"clusters": 12.5}, "clusters must be 1 to 256, got 12.5"),
        ({"clusters": "8"}, "clusters must be 1 to 256, got '8'"),
        ({"demean": "no"}, r"demean must be one of \(None, True, False\), got 'no'"),
        ({"rotate_qk": "auto"}, r"rotate_qk must be one of \(None, True, False\), got 'auto'"),
    ],
)
def test_combinations_without_a_recipe(choices, message):
    with pytest.raises(ValueError, match=message):
        VCConfig(**choices)


@pytest.mark.parametrize(
    ("keys", "clusters"),
    [
        (1, 1),
        (128, 1),
        (256, 1),
        (384, 2),
        (1440, 8),
        (7800, 32),
        (24_576, 128),
        (24_448, 64),
        (400_000, 128),
    ],
)
def test_few_keys_get_few_clusters(keys, clusters):
    assert VCConfig().clusters_for(keys) == clusters
    assert VCConfig(clusters=1).clusters_for(keys) == 1
