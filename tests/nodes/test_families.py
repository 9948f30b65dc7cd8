import pytest
from comfyui_vc_attention.nodes.families import AttentionCall, ForwardNotes, Layer, family_of

WAN = ("tiny_wan", "tiny_wan_i2v", "tiny_wan22_5b", "tiny_wan22_high+low")


def shape_of(tensor, heads, skip_reshape):
    shape = tensor[0]
    return tuple(shape) if skip_reshape else (shape[0], heads, shape[1], shape[2] // heads)


def call_of(record, index=0):
    skip = bool(record["kwargs"].get("skip_reshape"))
    shapes = [shape_of(record[name], record["heads"], skip) for name in ("q", "k", "v")]
    options = {key: index if value == "int" else value for key, value in record["options"].items()}
    if options.get("block_index") == "absent":
        del options["block_index"]
    return AttentionCall(*shapes, options)


def diffusion_model(path):
    module, _, name = path.rpartition(".")
    return type(name, (), {"__module__": module, "__qualname__": name})()


@pytest.mark.parametrize("model", WAN)
def test_every_recorded_wan_call_is_told_apart(recorded, model):
    entry = recorded["models"][model]
    family = family_of(diffusion_model(entry["dit_class"]))
    for record in entry["calls"]:
        if record["q"][0][1] == record["k"][0][1] == 512:
            continue  # text as long as the clip: by order, next test
        layer = family.layer(call_of(record, index=2), ForwardNotes(text_tokens=512))
        assert layer == (Layer("double", 2, 2) if record["kind"] == "self" else "cross-attention"), record


def square(index, tokens=512):
    shape = (2, 2, tokens, 128)
    return AttentionCall(shape, shape, shape, {"block_index": index, "block_type": "double"})


def rectangular(index, tokens=512, keys=257):
    q, k = (2, 2, tokens, 128), (2, 2, keys, 128)
    return AttentionCall(q, k, k, {"block_index": index, "block_type": "double"})


def taken(calls, text_tokens):
    family, notes = family_of(diffusion_model("comfy.ldm.wan.model.WanModel")), ForwardNotes(text_tokens)
    return [isinstance(family.layer(call, notes), Layer) for call in calls]


def test_text_as_long_as_the_clip():
    """D10: shapes, kwargs and options are equal; only the order tells."""
    assert taken([square(0), square(0), square(1), square(1)], 512) == [True, False, True, False]


def test_text_as_long_as_the_clip_with_an_image():
    block = [square(0), rectangular(0), square(0)]
    assert taken(block, 512) == [True, False, False]


def test_text_as_long_as_the_clip_in_vace():
    """VACE runs a second block under the same number."""
    assert taken([square(0)] * 4 + [square(1)] * 2, 512) == [True, False, True, False, True, False]


def test_vace_repeats_a_block_number():
    block = [square(0, 600), rectangular(0, 600, 512)] * 2
    assert taken(block, 512) == [True, False, True, False]


def test_calls_outside_the_blocks_are_left():
    shape = (1, 2, 64, 128)
    family = family_of(diffusion_model("comfy.ldm.wan.model.WanModel"))
    assert family.layer(AttentionCall(shape, shape, shape, {}), ForwardNotes()) == "outside the blocks"


def test_derived_models_belong_to_their_family():
    wan = type("WanModel", (), {"__module__": "comfy.ldm.wan.model", "__qualname__": "WanModel"})
    vace = type("VaceWanModel", (wan,), {"__module__": "comfy.ldm.wan.model"})
    assert family_of(vace()).name == "Wan"


@pytest.mark.parametrize(
    "path",
    ["comfy.ldm.flux.model.Flux", "comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel", "x.WanModel"],
)
def test_unknown_models_belong_to_none(path):
    """N22: only models that were validated are touched."""
    assert family_of(diffusion_model(path)) is None


HUNYUAN = "comfy.ldm.hunyuan_video.model.HunyuanVideo"
H3 = "comfy.ldm.minimax.model.MiniMaxH3Model"


@pytest.mark.parametrize("model", ["tiny_hunyuan_video", "tiny_hunyuan_video15"])
def test_every_recorded_hunyuan_call_is_told_apart(recorded, model):
    entry = recorded["models"][model]
    family = family_of(diffusion_model(entry["dit_class"]))
    for record in entry["calls"]:
        layer = family.layer(call_of(record, index=1), ForwardNotes())
        if record["kind"] == "text_refiner":
            assert layer == "text refiner"
        else:
            assert layer.kind == record["options"]["block_type"] and layer.index == 1


def test_hunyuan_single_blocks_count_on_after_the_double_ones():
    """exact_blocks names a block by its place in the model; the host's numbers start again."""
    family, notes = family_of(diffusion_model(HUNYUAN)), ForwardNotes()
    shape = (1, 3, 64, 128)
    seen = []
    for kind, total in (("double", 20), ("single", 40)):
        for index in (0, total - 1):
            options = {"block_type": kind, "block_index": index, "total_blocks": total}
            seen.append(family.layer(AttentionCall(shape, shape, shape, options), notes).position)
    assert seen == [0, 19, 20, 59]


def test_flat_patches_are_an_image_model():
    made = diffusion_model(HUNYUAN)
    made.patch_size = [2, 2]
    assert family_of(made) is None
    made.patch_size = [1, 2, 2]
    assert family_of(made).name == "HunyuanVideo"


def h3_blocks(options=(), calls=50, tokens=838):
    family, notes = family_of(diffusion_model(H3)), ForwardNotes()
    shape = (1, 56, tokens, 128)
    return [family.layer(AttentionCall(shape, shape, shape, dict(options)), notes) for _ in range(calls)]


def test_d12_h3_blocks_are_counted_where_the_host_does_not_number_them():
    for _ in range(3):  # cond, uncond, and again after an aborted forward: notes are new each time
        assert [layer.index for layer in h3_blocks()] == list(range(50))
    h3_blocks(calls=17)
    assert h3_blocks()[0].index == 0


def test_h3_head_groups_belong_to_one_block():
    assert [layer.index for layer in h3_blocks({"minimax_head_chunks": 4}, calls=8)] == [0] * 4 + [1] * 4


def test_h3_of_newer_hosts_numbers_blocks_and_shows_its_refiner():
    layout = {"minimax_h3_layout": object()}
    assert h3_blocks(layout, calls=2, tokens=64) == ["text refiner"] * 2
    assert h3_blocks({**layout, "block_index": 7}, calls=1) == [Layer("double", 7, 7)]
