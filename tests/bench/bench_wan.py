"""A Wan-14B-shaped or MiniMax-H3-shaped model in ComfyUI's own sampler: time of a step, of attention, peak.

usage: COMFYUI_PATH=/path/to/ComfyUI python tests/bench/bench_wan.py [wan | h3] [--blocks 4] [--compile]
    [--json FILE]

Real widths and clip, a few blocks, random bf16 weights, one condition, euler. A whole model's time is
extrapolated from the time inside the blocks. Every attention function is timed and watched by the same code,
on the GPU's clock. Runs in ComfyUI's Python. "grouped" is a step inside the grouping window. --compile asks
instead what the graph break at every attention costs under TorchCompileModel.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path

import torch

if "COMFYUI_PATH" not in os.environ:
    sys.exit(__doc__ + "\nCOMFYUI_PATH must name a ComfyUI checkout.")
TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
sys.path.insert(0, os.environ["COMFYUI_PATH"])
import conftest  # noqa: F401, E402, gives the checkout its import name

sys.argv, ARGUMENTS = [sys.argv[0], "--use-pytorch-cross-attention"], sys.argv[1:]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.model_management  # noqa: E402
import comfy.ops  # noqa: E402
import comfy.sd  # noqa: E402
from comfy.ldm.modules import attention as host  # noqa: E402
from comfy.patcher_extension import WrappersMP  # noqa: E402
from comfyui_vc_attention.nodes.patch_node import VCAttentionPatch  # noqa: E402
from timing import environment  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

OVERRIDE = "optimized_attention_override"
STEPS, PEER_STEPS = 8, 3  # ours: 2 steps of 8 are grouped; every step of another function is alike
CLIP_STEPS, CLIP_GROUPED = 40, 10
# blocks of the whole model, latent frames x height x width (Wan: 720p, 81 frames; H3: 1344 x 768, 362 frames)
SHAPES = {"wan": (40, (21, 90, 160)), "h3": (50, (107, 48, 84))}


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, TESTS / "host" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(kind, blocks):
    """A ModelPatcher of ComfyUI's own class with random weights."""
    common = {"operations": comfy.ops.disable_weight_init, "dtype": torch.bfloat16, "device": "meta"}
    if kind == "h3":
        from comfy.ldm.minimax.model import MiniMaxH3Model

        empty = MiniMaxH3Model(num_layers=blocks, token_refiner_num_layers=1, **common)
    else:
        from comfy.ldm.wan.model import WanModel

        shape = {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": blocks}
        empty = WanModel(model_type="t2v", in_dim=16, out_dim=16, **shape, **common)
    generator = torch.Generator("cuda").manual_seed(0)
    weights = {name: random_weight(name, like, generator) for name, like in empty.state_dict().items()}
    return comfy.sd.load_diffusion_model_state_dict(weights, model_options={"dtype": torch.bfloat16})


def random_weight(name, like, generator):
    """A weight that keeps activations near unit variance."""
    if name == "rope.inv_freq":
        return 10000.0 ** (-torch.arange(like.shape[0]) / like.shape[0])
    if like.ndim < 2:
        return (torch.ones if name.endswith("weight") else torch.zeros)(like.shape, dtype=like.dtype)
    noise = torch.randn(like.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    return (noise / like[0].numel() ** 0.5).to(like.dtype).cpu()


class Event:
    """A stretch of the stream."""

    def __enter__(self):
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.begin.record()
        return self

    def __exit__(self, *error):
        self.end.record()

    @property
    def ms(self):
        return self.begin.elapsed_time(self.end)


class Watch:
    """Around every forward, its blocks and its self-attention calls: events and peaks of memory."""

    def __init__(self, model, attention=None, forwards_only=False):
        """attention: (func, q, k, v, ...) -> out, or None for what the model has."""
        self.model = model.clone()
        self.forwards_only = forwards_only
        options = self.model.model_options.setdefault("transformer_options", {})
        self._vc_previous = attention or options.get(OVERRIDE)
        if not forwards_only:
            options[OVERRIDE] = self
        self.model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "bench", self.forward)
        self.forwards, self.calls, self.inside, self.peaks, self.call_peaks = [], [], [], [], []
        self.count, self.tokens = [], 0

    def forward(self, executor, *args, **kwargs):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.peak, before = 0, len(self.calls)
        held = torch.cuda.memory_allocated()
        blocks = contextlib.nullcontext() if self.forwards_only else self.blocks_timed()
        with blocks, Event() as event:
            out = executor(*args, **kwargs)
        torch.cuda.synchronize()
        self.peaks.append(max(self.peak, torch.cuda.max_memory_allocated()) - held)
        self.forwards.append(event)
        self.count.append(len(self.calls) - before)
        return out

    @contextlib.contextmanager
    def blocks_timed(self):
        blocks = self.model.model.diffusion_model.blocks
        event = Event()
        hooks = (
            blocks[0].register_forward_pre_hook(lambda *_: event.__enter__() and None),
            blocks[-1].register_forward_hook(lambda *_: event.__exit__()),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.inside.append(event)

    def watched(self, q, k, call):
        if q.shape != k.shape:
            return call()
        self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
        held, bytes_of_q = torch.cuda.memory_allocated(), q.numel() * q.element_size()
        self.tokens = q.shape[-2]
        del q, k
        with Event() as event:
            out = call()
        self.calls.append(event)
        self.call_peaks.append((torch.cuda.max_memory_allocated() - held) / bytes_of_q)
        return out

    def __call__(self, func, q, k, v, *args, **kwargs):
        attention = self._vc_previous
        call = (lambda: attention(func, q, k, v, *args, **kwargs)) if attention else None
        return self.watched(q, k, call or (lambda: func(q, k, v, *args, **kwargs)))

    def container_function(self, q, k, v, *args, **kwargs):
        function = getattr(self._vc_previous, "container_function", None)
        if self._vc_previous is None:
            function = host.optimized_attention
        return self.watched(q.peek(), k.peek(), lambda: (function or self.unboxed)(q, k, v, *args, **kwargs))

    def unboxed(self, q, k, v, *args, **kwargs):
        tensors = (box.take() for box in (q, k, v))
        return self._vc_previous(host.attention_pytorch.__wrapped__, *tensors, *args, **kwargs)

    def steps(self, first, last):
        """Medians over some forwards: ms of the step, in the blocks, in self-attention."""
        starts = [sum(self.count[:i]) for i in range(len(self.count) + 1)]
        rows = range(first, min(last, len(self.forwards)))
        whole = statistics.median(self.forwards[i].ms for i in rows)
        inside = statistics.median(self.inside[i].ms for i in rows)
        calls = statistics.median(sum(c.ms for c in self.calls[starts[i] : starts[i + 1]]) for i in rows)
        return {"step_ms": whole, "blocks_ms": inside, "attention_ms": calls}


def cudnn(func, *args, **kwargs):
    """ComfyUI's PyTorch attention on cuDNN's kernel, the fastest that PyTorch has on this card."""

    def only_cudnn(*a, **kw):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*a, **kw)

    usual, comfy.ops.scaled_dot_product_attention = comfy.ops.scaled_dot_product_attention, only_cudnn
    try:
        return func(*args, **kwargs)
    finally:
        comfy.ops.scaled_dot_product_attention = usual


def kitchen():
    """comfy-kitchen's INT8 attention as an override, or None where it does not run."""
    with contextlib.suppress(Exception):
        from comfy_kitchen import int8_attention_is_available

        function = host.REGISTERED_ATTENTION_FUNCTIONS.get("comfy_kitchen_int8")
        if int8_attention_is_available() and function is not None:
            bare = function.__wrapped__

            def override(func, *args, **kwargs):
                return bare(*args, **kwargs)

            override.container_function = function.container_function
            return override
    return None


def patched(model, **widgets):
    return VCAttentionPatch.execute(model, **widgets).args[0]


def run(watch, kind, sampling, steps):
    size = SHAPES[kind][1]
    name = "t2v" if kind == "wan" else kind
    sampling.sample(watch.model, steps=steps, cfg=1.0, kind=name, size=size, text_tokens=512)


def extrapolated(row, blocks, whole):
    """Seconds of a step of the whole model."""
    return (row["step_ms"] - row["blocks_ms"] + row["blocks_ms"] * whole / blocks) / 1e3


def measure(kind, blocks):
    sampling = loaded("sampling")
    sampling.TEXT_WIDTH["h3"] = 5120
    model = build(kind, blocks)
    modes = {"ComfyUI's PyTorch attention": None, "cuDNN": cudnn}
    if kitchen() is not None:
        modes["comfy-kitchen INT8"] = kitchen()
    rows = []
    for name, attention in modes.items():
        watch = Watch(model, attention)
        run(watch, kind, sampling, PEER_STEPS)
        rows.append(row_of(name, watch, 1, PEER_STEPS, blocks, kind))
    for name, widgets in {"auto": {}, "int8": {"expcast": "off", "value_format": "int8"}}.items():
        ours = patched(model, **widgets)
        watch = Watch(ours)
        run(watch, kind, sampling, STEPS)
        report = ours.model_options["transformer_options"][OVERRIDE].finished[-1]
        ran = ", ".join(report.kernels)
        rows.append(row_of(f"{name}, grouped: {ran}", watch, 0, 2, blocks, kind))
        rows[-1]["state_mib"] = report.state_bytes / 2**20
        rows.append(row_of(f"{name}, plain", watch, 2, STEPS, blocks, kind))
        print(report.summary(), flush=True)
    return rows


def measure_compiled(kind, blocks):
    """ms of a step, eager and compiled by TorchCompileModel, without us and with us."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict

    sampling, model, rows = loaded("sampling"), build(kind, blocks), {}
    for name, made in {"usual": model, "patched": patched(model, grouping_window=0.0)}.items():
        for mode in ("eager", "compiled"):
            watch = Watch(made, forwards_only=True)
            if mode == "compiled":
                filtered = {"guard_filter_fn": skip_torch_compile_dict}
                set_torch_compile_wrapper(watch.model, "inductor", options=filtered)
            run(watch, kind, sampling, 4)
            rows[f"{name} {mode}"] = statistics.median(event.ms for event in watch.forwards[1:])
    saved = [rows[f"{name} eager"] - rows[f"{name} compiled"] for name in ("usual", "patched")]
    print(rows, f"compiling saves {saved[0]:.1f} ms of the usual step, {saved[1]:.1f} of the patched one")
    return rows


def row_of(name, watch, first, last, blocks, kind):
    row = {"name": name, "tokens": watch.tokens, **watch.steps(first, last)}
    row["share"] = row["attention_ms"] / row["step_ms"]
    row["peak_gib"] = max(watch.peaks[first:last]) / 2**30
    row["call_peak_q"] = max(watch.call_peaks[sum(watch.count[:first]) : sum(watch.count[:last])])
    row["whole_step_s"] = extrapolated(row, blocks, SHAPES[kind][0])
    print(row, flush=True)
    return row


def markdown(rows, kind, blocks):
    whole = SHAPES[kind][0]
    lines = [
        f"{kind}, {rows[0]['tokens']:,} tokens, {blocks} blocks of {whole}; last column extrapolated",
        "",
        "| attention | step, ms | attention, ms | share | peak of the step, GiB "
        f"| peak of a call beside q, k, v, in q's | step of {whole} blocks, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['step_ms']:.0f} | {row['attention_ms']:.0f} | {row['share']:.0%} "
            f"| {row['peak_gib']:.2f} | {row['call_peak_q']:.2f} | {row['whole_step_s']:.2f} |"
        )
    usual = [row for row in rows if "," not in row["name"]]
    for name in ("auto", "int8"):
        grouped, plain = (
            next(r for r in rows if r["name"].startswith(f"{name}, {w}")) for w in ("grouped", "plain")
        )
        clip = CLIP_GROUPED * grouped["whole_step_s"] + (CLIP_STEPS - CLIP_GROUPED) * plain["whole_step_s"]
        for other in usual:
            theirs = CLIP_STEPS * other["whole_step_s"]
            limit = 1 / (1 - other["attention_ms"] / other["step_ms"])
            lines.append(
                f"\n{CLIP_STEPS} steps, {whole} blocks, one condition: {name} {clip:.0f} s, {other['name']} "
                f"{theirs:.0f} s, {theirs / clip:.2f}x; attention for nothing would give {limit:.2f}x"
            )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", nargs="?", choices=SHAPES, default="wan")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(ARGUMENTS)
    if options.compile:
        measure_compiled(options.kind, options.blocks)
        return
    rows = measure(options.kind, options.blocks)
    print(markdown(rows, options.kind, options.blocks))
    if options.json:
        options.json.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
