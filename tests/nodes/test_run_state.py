import torch
from comfyui_vc_attention.kernels import AttentionProblem, VCConfig, group_tokens
from comfyui_vc_attention.kernels.dispatch import plain
from comfyui_vc_attention.nodes import run_state
from comfyui_vc_attention.nodes.families import FAMILIES, Layer
from comfyui_vc_attention.nodes.patch_settings import PatchSettings
from comfyui_vc_attention.nodes.run_state import Forward, GroupingStore, Run, conditions, context_window
from comfyui_vc_attention.nodes.step_schedule import StepSchedule

SIGMAS = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.0]


def new_run(**settings):
    schedule = StepSchedule(SIGMAS, lambda percent: 1 - percent, settings.pop("window", 0.5))
    return Run(object(), PatchSettings(VCConfig(clusters=4), "reference", **settings), FAMILIES[0], schedule)


def grouped(store, v, chunks, step=0, every=4, layer="layer", again=True):
    previous_seen = []

    def make(rows_v, previous, rows):
        previous_seen.append(previous)
        return group_tokens(rows_v, 4, previous)

    grouping, made = store.grouping(layer, chunks, v, make, step, every, again)
    return grouping, made, previous_seen


def values(batch=2, tokens=64):
    return torch.randn(batch, 2, tokens, 16, generator=torch.Generator().manual_seed(batch))


def test_batched_conditions_get_the_orders_they_get_alone():
    """ComfyUI may batch conditions in one step and not in the next."""
    v = values()
    together, made, _ = grouped(GroupingStore(), v, ["uncond", "cond"])
    assert made == 2
    for row, chunk in enumerate(("uncond", "cond")):
        alone, _, _ = grouped(GroupingStore(), v[row : row + 1], [chunk])
        assert torch.equal(alone.order, together.order[row : row + 1])


def test_batching_may_flip_between_steps():
    store, v = GroupingStore(), values()
    together, _, _ = grouped(store, v, ["uncond", "cond"])
    alone, made, _ = grouped(store, v[1:], ["cond"], step=1)
    assert made == 0 and torch.equal(alone.order, together.order[1:])
    flipped, made, _ = grouped(store, v.flip(0), ["cond", "uncond"], step=2)
    assert made == 0 and torch.equal(flipped.order, together.order.flip(0))


def test_orders_are_reused_then_made_again_from_where_they_were():
    store, v = GroupingStore(), values(1)
    first, _, previous = grouped(store, v, ["cond"])
    assert previous == [None]
    for step in (1, 2, 3, 2):
        again, made, _ = grouped(store, v, ["cond"], step)
        assert made == 0 and again.order is first.order
    _, made, previous = grouped(store, v, ["cond"], step=4)
    assert made == 1 and torch.equal(previous[0].centroids, first.centroids.bfloat16().float())
    grouped(store, v, ["cond"], step=8, again=False)
    _, made, previous = grouped(store, v, ["cond"], step=12)
    assert made == 1 and previous == [None]  # nobody said that there would be another


def test_layers_conditions_and_batch_sizes_never_mix():
    store = GroupingStore()
    grouped(store, values(1), ["cond"], layer="a")
    grouped(store, values(1), ["cond"], layer="b")
    grouped(store, values(1), ["uncond"], layer="a")
    grouped(store, values(2), ["cond"], layer="a")  # a batch of two latents
    assert len(store) == 4


def test_held_bytes_are_counted_and_freed():
    store = GroupingStore()
    centroids = 2 * 2 * 4 * 16  # B, H, C, D
    for again, expected in ((False, 2 * 2 * 64 * 4), (True, 2 * 2 * 64 * 4 + centroids * 2)):
        store.clear()
        grouped(store, values(2), ["uncond", "cond"], again=again)
        assert store.held_bytes == expected
    store.clear(torch.device("cuda:1"))
    assert store.held_bytes == expected  # they lie elsewhere
    store.clear()
    assert store.held_bytes == 0 and len(store) == 0


def test_context_windows_that_moved_on_are_dropped():
    store = GroupingStore()
    for step in range(20):
        grouped(store, values(1), ["cond"], step, layer=("window", step))
        store.drop_unused(step, every=4)
        assert len(store) <= 8


def test_rows_that_do_not_divide_are_one_part():
    _, made, _ = grouped(GroupingStore(), values(3), ["uncond", "cond"])
    assert made == 1


def test_run_frees_its_orders_when_the_window_closes():
    run = new_run()
    run.begin_evaluation(1.0)
    grouped(run.store, values(1), ["cond"])
    run.begin_evaluation(0.9)
    assert len(run.store) == 1 and run.config() == run.settings.config
    run.begin_evaluation(0.6)
    assert len(run.store) == 0 and run.config() == plain(run.settings.config)


def test_closing_a_run_frees_everything():
    run = new_run()
    grouped(run.store, values(1), ["cond"])
    run.close()
    assert run.store.held_bytes == 0


def test_a_disabled_kernel_is_not_chosen_again():
    run = new_run()
    q = torch.zeros(1, 1, 8, 16)
    problem = AttentionProblem.of(q, q, q, run.config())
    assert run.choose(problem).kernel.name == "reference"
    assert run.disable("reference", "broken") and not run.disable("reference", "broken")
    choice = run.choose(problem)
    assert choice.kernel is None and "reference failed" in choice.reason


def test_calls_of_one_block_are_told_apart_by_their_place():
    run = new_run()
    cpu = torch.device("cpu")
    keys = [Forward(run).layer_key(Layer("double", 0, 0), cpu, 2, 64, {}) for _ in range(2)]
    assert keys[0] == keys[1]  # the same call of two forwards
    forward = Forward(run)
    keys = [forward.layer_key(Layer("double", 0, 0), cpu, 2, 64, {}) for _ in range(2)]
    assert keys[0] != keys[1]  # two calls of one forward (VACE)


def test_a_mask_is_judged_once_per_forward():
    forward, asked = Forward(new_run()), []
    mask = torch.zeros(1, 1, 4)
    for _ in range(3):
        assert forward.mask_once(mask, lambda m: asked.append(m) or "verdict") == "verdict"
    assert len(asked) == 1


def test_conditions_carry_their_list():
    """The same uuid may stand in the positive and in the negative list."""
    names = conditions({"uuids": ["a", "a"], "cond_or_uncond": [1, 0]})
    assert len(set(names)) == 2
    assert conditions({}) == [(0, 0)]


def test_context_window_is_its_frames():
    window = type("Window", (), {"index_list": [0, 1, 5]})()
    assert context_window({"context_window": window}) == (0, 1, 5)
    assert context_window({}) is None


def test_short_of_memory_orders_are_kept_in_a_byte_a_key(monkeypatch):
    """The same orders for a quarter of the bytes, warm starts included."""

    def made(free):
        monkeypatch.setattr(run_state, "free_memory", lambda device: free)
        store, orders = GroupingStore(), []
        for step in range(6):
            make = lambda rows_v, previous, rows: group_tokens(rows_v, 4, previous)  # noqa: E731
            v = values() + 0.1 * step
            orders.append(store.grouping("layer", ["uncond", "cond"], v, make, step, 4)[0].order)
        return orders, store.held_bytes

    plenty, plenty_bytes = made(None)
    short, short_bytes = made(run_state.SHORT_OF_MEMORY - 1)
    assert all(torch.equal(one, other) for one, other in zip(plenty, short, strict=True))
    keys = plenty[0].numel()
    assert plenty_bytes - short_bytes == 3 * keys
