import pytest
import torch
from comfyui_vc_attention.nodes.attention_layout import (
    HeadsBox,
    heads_first,
    key_mask_of,
    like_caller,
    one_storage,
    split_heads,
)


def test_round_trip_is_views_only():
    x = torch.randn(2, 5, 3 * 8)
    heads = heads_first(x, 3, skip_reshape=False)
    assert heads.shape == (2, 3, 5, 8) and heads.data_ptr() == x.data_ptr()
    back = like_caller(heads, skip_output_reshape=False)
    assert torch.equal(back, x) and back.data_ptr() == x.data_ptr()
    assert like_caller(heads, skip_output_reshape=True) is heads


def test_heads_first_input_stays_as_it_is():
    x = torch.randn(1, 3, 5, 8)
    assert heads_first(x, 3, skip_reshape=True) is x


def test_fused_rows_keep_their_stride():
    """A row of 3 x 56 x 128 values: q, k and v are slices of it (MiniMax-H3)."""
    fused = torch.zeros(1, 9, 3 * 7168)
    q, k, v = split_heads(*fused.split(7168, dim=-1), heads=56, skip_reshape=False)
    assert {t.stride(2) for t in (q, k, v)} == {21504}
    assert all(t.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr() for t in (q, k, v))


def test_fewer_key_heads_are_seen():
    q, k, v = split_heads(torch.zeros(1, 5, 64), torch.zeros(1, 5, 16), torch.zeros(1, 5, 16), 8, False)
    assert q.shape == (1, 8, 5, 8) and k.shape == v.shape == (1, 2, 5, 8)


def test_wrong_shapes_say_what_came():
    with pytest.raises(ValueError, match=r"3 heads, got \(1, 5, 8\)"):
        heads_first(torch.zeros(1, 5, 8), 3, skip_reshape=False)
    with pytest.raises(ValueError, match=r"skip_reshape .* got \(1, 5, 8\)"):
        heads_first(torch.zeros(1, 5, 8), 3, skip_reshape=True)


def additive(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("shape", [(1, 3), (1, 1, 3), (1, 1, 1, 3)])
def test_key_mask_of_every_rank(shape):
    mask = additive(0.0, -torch.inf, -3e38).reshape(shape)
    assert key_mask_of(mask, batch=2, keys=3).tolist() == [[True, False, False]] * 2


def test_the_lowest_fp16_value_drops_a_key():
    """HunyuanVideo-1.5 runs in fp16, where padded text has this value."""
    mask = additive(0.0, -65504.0, 0.0, dtype=torch.float16).reshape(1, 1, 3)
    assert key_mask_of(mask, batch=1, keys=3).tolist() == [[True, False, True]]


def test_boolean_mask_counts_as_it_is():
    mask = torch.tensor([[True, False], [False, True]])[:, None, None]
    assert torch.equal(key_mask_of(mask, batch=2, keys=2), mask[:, 0, 0])


@pytest.mark.parametrize(
    "mask, reason",
    [
        (additive(0.0, -5.0, 0.0).reshape(1, 1, 3), "weighs keys"),
        (additive(0.0, -60000.0, 0.0, dtype=torch.float16).reshape(1, 1, 3), "weighs keys"),
        (torch.zeros(3, 3), "by query or head"),
        (torch.zeros(1, 2, 1, 3), "by query or head"),
        (torch.zeros(3, 1, 1, 3), "another batch size"),
    ],
)
def test_other_masks_are_named(mask, reason):
    assert reason in key_mask_of(mask, batch=2, keys=3)


def test_no_mask_is_no_mask():
    assert key_mask_of(None, batch=1, keys=3) is None


class Taken:
    """The host's box."""

    def __init__(self, tensor):
        self.tensor = tensor

    def peek(self):
        return self.tensor

    def take(self):
        tensor, self.tensor = self.tensor, None
        return tensor


@pytest.mark.parametrize("shape, skip_reshape", [((2, 5, 24), False), ((2, 3, 5, 8), True)])
def test_a_box_of_the_host_gives_heads_first_views_and_forgets(shape, skip_reshape):
    host = Taken(torch.randn(shape))
    box = HeadsBox(host, 3, skip_reshape)
    assert box.peek().shape == (2, 3, 5, 8) and box.peek().data_ptr() == host.tensor.data_ptr()
    assert not box.taken and host.tensor is not None
    assert box.take().shape == (2, 3, 5, 8) and box.taken and host.tensor is None


def test_one_storage_is_one_however_it_is_viewed():
    fused = torch.randn(4, 3, 6)
    assert one_storage(fused.unbind(1)) and one_storage([fused[:2], fused[2:].transpose(0, 1)])
    assert not one_storage([fused, fused.clone()])
