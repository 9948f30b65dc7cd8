"""What only a GPU shows of the Triton kernels: accumulator width, huge strides, speed paths, repeatability.

The truth tables under tests/kernels run on the GPU too where there is one.
"""

import pytest
import torch
from comfyui_vc_attention.kernels import VCConfig, group_tokens, vc_attention
from comfyui_vc_attention.kernels.config import Recipe
from comfyui_vc_attention.kernels.testing import exact_attention, relative_l2, sample_qkv

from tests.evidence.bounds import bound

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

KERNELS = ("triton_int8_fp8", "triton_fp8_fp8", "triton_int8_int8")
RECIPES = ("int8_fp8 + ExpCast", "fp8_fp8 + ExpCast", "int8_int8")
BOUNDS = {kernel: bound(f"{name}, means, sequence") for kernel, name in zip(KERNELS, RECIPES, strict=True)}

every_kernel = pytest.mark.parametrize("kernel", KERNELS)


@pytest.fixture(autouse=True)
def fp8_card(request):
    if torch.cuda.get_device_capability() < (8, 9) and "int8_int8" not in request.node.name:
        pytest.skip("E4M3 needs sm_89 or newer")


def run(q, k, v, kernel, **options):
    return vc_attention(q, k, v, kernel=kernel, **options)


@every_kernel
@pytest.mark.parametrize(
    "lengths", [(1, 1), (9, 129), (63, 65), (127, 503), (129, 1001), (1001, 127), (4000, 5000)]
)
def test_any_length(kernel, lengths):
    check_near_exact(kernel, (1, 2, lengths[0], 128), lengths[1], torch.bfloat16)


@every_kernel
@pytest.mark.parametrize(
    "dtype, head_dim", [(torch.float16, 128), (torch.float32, 128), (torch.bfloat16, 64), (torch.float16, 64)]
)
def test_dtypes_and_head_dims(kernel, dtype, head_dim):
    check_near_exact(kernel, (2, 3, 300, head_dim), 400, dtype)


def check_near_exact(kernel, shape, keys, dtype):
    q, k, v = sample_qkv("clustered", shape, keys, dtype, "cuda")
    out, lse = run(q, k, v, kernel, grouping=group_tokens(v, 8), return_lse=True)
    exact, exact_lse = exact_attention(q, k, v)
    assert out.dtype == dtype
    assert relative_l2(out, exact) < BOUNDS[kernel]
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=0.05)


@every_kernel
@pytest.mark.parametrize("demean", [True, False])
def test_long_rows_keep_their_mean(kernel, demean):
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v = (torch.randn(1, 1, n, 128, device="cuda", generator=generator) for n in (256, 299520, 299520))
    v = (1 + 0.01 * v).bfloat16()
    out = run(q.bfloat16(), k.bfloat16(), v, kernel, config=VCConfig(demean=demean))
    kept = v.float()
    if not demean and kernel.endswith("fp8"):
        # E4M3 alone keeps 0.98 of such values: what is asked of the kernel is the mean of its codes
        scale = kept.abs().amax(2, keepdim=True) / 224
        kept = (kept / scale).to(torch.float8_e4m3fn).float() * scale
    # 14-bit accumulators that are not promoted lose percents here
    means = out.float().mean(-1)
    assert ((means / kept.mean() - 1).abs() < 0.002).all(), (means.min(), means.max(), kept.mean())


@every_kernel
def test_rows_past_two_to_the_31_elements(kernel):
    buffer = torch.empty(2_300_000_000, dtype=torch.bfloat16, device="cuda")
    shape, strides = (1, 270, 1, 128), (2**23 * 270, 2**23, 128, 1)
    views = [buffer.as_strided(shape, strides, offset).transpose(1, 2) for offset in (0, 128, 256)]
    for view, values in zip(views, sample_qkv("clustered", (1, 1, 270, 128), device="cuda"), strict=True):
        view.copy_(values)
    order = group_tokens(views[2], 4)
    copies = [view.contiguous() for view in views]
    assert torch.equal(order.order, group_tokens(copies[2], 4).order)
    assert torch.equal(run(*views, kernel, grouping=order), run(*copies, kernel, grouping=order))


@every_kernel
def test_views_of_one_long_fused_tensor(kernel):
    length = 101_000
    fused = torch.empty(1, length, 3 * 56 * 128, dtype=torch.bfloat16, device="cuda")
    generator = torch.Generator("cuda").manual_seed(4)
    q, k, v = fused.view(1, length, 3, 56, 128).permute(2, 0, 3, 1, 4)[:, :, 54:]
    for view in (q, k, v):
        view.copy_(torch.randn(view.shape, device="cuda", generator=generator))
    assert q.stride(2) == 21504 and q.storage_offset() + length * 21504 > 2**31
    q = q[:, :, -1500:]
    views, copies = run(q, k, v, kernel), run(q.contiguous(), k.contiguous(), v.contiguous(), kernel)
    assert torch.equal(views, copies)


@every_kernel
@pytest.mark.parametrize("kind", ["gauss", "clustered", "outlier_tokens", "k_outlier_channels"])
def test_repeated_runs_are_bit_equal(kernel, kind):
    q, k, v = sample_qkv(kind, (1, 4, 3000, 128), dtype=torch.bfloat16, device="cuda")
    grouping = group_tokens(v, 64)
    first = run(q, k, v, kernel, grouping=grouping)
    assert relative_l2(first, exact_attention(q, k, v)[0]) < BOUNDS[kernel]
    for _ in range(5):
        assert torch.equal(group_tokens(v, 64).order, grouping.order)
        assert torch.equal(run(q, k, v, kernel, grouping=grouping), first)


@every_kernel
def test_masked_keys_are_removed_keys(kernel):
    q, k, v = sample_qkv("clustered", (1, 2, 700, 128), dtype=torch.bfloat16, device="cuda")
    mask = torch.rand(1, 700, device="cuda", generator=torch.Generator("cuda").manual_seed(5)) < 0.6
    expected = run(q, k[:, :, mask[0]], v[:, :, mask[0]], kernel)
    k, v = (torch.where(mask[:, None, :, None], x, torch.nan) for x in (k, v))
    assert torch.equal(run(q, k, v, kernel, key_mask=mask), expected)


@every_kernel
@pytest.mark.parametrize("direction", [1, -1], ids=["rising", "falling"])
def test_maximum_that_moves_from_tile_to_tile(kernel, direction):
    q, k, v = sample_qkv("clustered", (1, 2, 500, 128), keys=6000, device="cuda")
    ramp = torch.linspace(-direction, direction, 6000, device="cuda")[None, None, :, None]
    k += 3 * ramp * q.mean(2, keepdim=True)
    k[:, :, 5990] += 4 * q[:, :, 7]  # a late spike in some rows
    out = run(q, k, v, kernel, config=VCConfig(smooth_k=False))
    # twice, chosen: single keys carry the rows that have a spike, and the table has no such tensors
    assert relative_l2(out, exact_attention(q, k, v)[0]) < 2 * BOUNDS[kernel]


@every_kernel
def test_large_values(kernel):
    q, k, v = sample_qkv("gauss", (1, 2, 64, 128), keys=32768, dtype=torch.float16, device="cuda")
    assert run(q, k, 6e4 * v.sign(), kernel).isfinite().all()
    out = run(q, k, torch.full_like(v, 6e4), kernel)
    assert ((out.float() - 6e4).abs() < 600).all()
    q, k, v = (x.bfloat16() for x in (q, k, v))
    for scale in (1e3, 1e5):  # past fp16's largest number
        out = run(q, k, scale * v, kernel)
        assert out.isfinite().all()
        assert relative_l2(out, exact_attention(q, k, scale * v)[0]) < BOUNDS[kernel]


def test_expcast_assembly_equals_plain_operations():
    from comfyui_vc_attention.kernels.attend.triton_int8_fp8 import launch
    from comfyui_vc_attention.kernels.prepare.triton_int8_fp8 import prepare

    q, k, v = sample_qkv("peaked", (1, 4, 2000, 128), dtype=torch.bfloat16, device="cuda")
    operands = prepare(q, k, v, Recipe("int8_fp8", expcast=True), softmax_scale=128**-0.5)
    assert torch.equal(launch(operands, asm=True)[0], launch(operands, asm=False)[0])


def test_grouping_removes_the_references_energy():
    from comfyui_vc_attention.kernels.group import reference
    from comfyui_vc_attention.kernels.testing import energy_removed

    v = sample_qkv("clustered", (1, 2, 1, 128), keys=40_000, dtype=torch.bfloat16, device="cuda")[2]
    expected = energy_removed(v, reference.group_tokens(v, 128).order)
    cold = group_tokens(v, 128)
    assert energy_removed(v, cold.order) > expected - 0.02
    moved = v + 0.1 * torch.randn_like(v)
    assert energy_removed(moved, group_tokens(moved, 128, cold).order) > expected - 0.03


def test_call_makes_no_host_synchronisation():
    q, k, v = sample_qkv("clustered", (1, 2, 500, 128), dtype=torch.bfloat16, device="cuda")

    def call():
        return run(q, k, v, "triton_int8_fp8", grouping=group_tokens(v, 8), return_lse=True)

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
