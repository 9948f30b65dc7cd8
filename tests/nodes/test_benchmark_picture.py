import numpy as np
from comfyui_vc_attention.kernels.benchmark import Result, Shape
from comfyui_vc_attention.nodes.benchmark_picture import GROUPED, OTHERS, OURS, benchmark_picture

ROWS = [
    Result("PyTorch", milliseconds=20.0, error=0.002),
    Result("triton_int8_fp8 (int8_fp8)", None, 8.0, 7.0, 9.0, 2.0, 0.02, 0.018, 2**28),
    Result("SageAttention", "not installed"),
]


def pixels_of(picture, colour):
    return int((np.asarray(picture) == colour).all(-1).sum())


def test_bars_are_as_long_as_the_times():
    picture = benchmark_picture(Shape("Wan 14B", 40, 32_760), ROWS)
    ours, others, grouped = (pixels_of(picture, colour) for colour in (OURS, OTHERS, GROUPED))
    assert 2.3 < others / ours < 2.7 and grouped > 0


def test_nothing_measured_is_a_page_too():
    assert benchmark_picture(Shape("x", 1, 128), ROWS[2:]).height > 50
