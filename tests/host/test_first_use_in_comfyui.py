"""The first use of a kernel inside a real ComfyUI: its progress bar moves, its cancel button works."""

import pytest

pytestmark = pytest.mark.comfyui


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A CPU that calls itself a card, with one kernel that auto may take."""
    from functools import partial

    from comfyui_vc_attention.kernels import device_record, registry
    from comfyui_vc_attention.kernels.selftest import Case
    from comfyui_vc_attention.kernels.validation import validate
    from comfyui_vc_attention.nodes import first_use, patch_node

    cases = (Case("plain", (1, 1, 40, 128), 40, means=False),)
    stages = registry.kernel_named("reference").load
    rows = (registry.KernelSpec("made_up", ("int8_int8",), stages, lambda problem: None),)
    monkeypatch.setattr(registry, "KERNELS", rows)
    monkeypatch.setattr(device_record, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(device_record, "_memory", {})
    monkeypatch.setattr(first_use, "validate", partial(validate, cases=cases, lengths=()))
    fields = {"device_type": "cpu", "device_name": "cpu"}
    monkeypatch.setattr(patch_node, "card_fields", lambda device: fields)
    return device_record.record_of("cpu", None)


@pytest.fixture
def progress():
    """What ComfyUI's progress bar showed: (value, total) each time."""
    import comfy.utils

    shown, before = [], comfy.utils.PROGRESS_BAR_HOOK
    comfy.utils.set_progress_bar_global_hook(lambda value, total, *rest, **more: shown.append((value, total)))
    yield shown
    comfy.utils.set_progress_bar_global_hook(before)


def test_the_node_tries_a_kernel_once_with_the_progress_bar(card, progress, load_tiny):
    from comfyui_vc_attention.nodes.patch_node import VCAttentionPatch

    model = load_tiny()
    assert VCAttentionPatch.execute(model).args[0] is not model
    assert card.entry("made_up").state == "passed"
    assert progress and all(value <= total for value, total in progress)
    progress.clear()
    assert VCAttentionPatch.execute(model).args[0] is not model
    assert not progress


def test_cancelling_keeps_nothing(card, load_tiny):
    import comfy.model_management
    from comfyui_vc_attention.nodes.patch_node import VCAttentionPatch

    comfy.model_management.interrupt_current_processing()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        VCAttentionPatch.execute(load_tiny())
    assert card.entry("made_up") is None
