"""Tool "readme": the lines of the README that quote results/h200, as they follow from its tables."""

from .bounds import results
from .models import KINDS
from .tables import rows_of

TOKENS, HEADS = (32_768, 75_600), 40
ROWS = {
    "cuda_int8_fp8_sm90": "`cuda_int8_fp8_sm90` (`auto`)",
    "cuda_int8_int8_sm90": "`cuda_int8_int8_sm90` (`expcast off`)",
    "FlashAttention-4": "FlashAttention-4 {flash-attn-4}, 16 bits",
    "SageAttention 2": "SageAttention {sageattention}",
    "comfy-kitchen INT8": "comfy-kitchen {comfy-kitchen} INT8",
}
MODELS = tuple(name for name, *_ in KINDS.values())
CLIPS = {
    "`auto`": "int8_fp8 + ExpCast, window of a quarter",
    "`expcast off`": "int8_int8, window of a quarter",
    "comfy-kitchen": "comfy-kitchen INT8 (package)",
    "SageAttention 2": "SageAttention 2 (package)",
}
ATTENTIONS = {
    "ComfyUI's PyTorch attention": "ComfyUI's PyTorch attention, as it chooses here",
    "cuDNN": "PyTorch, cuDNN backend",
    "comfy-kitchen INT8": "comfy-kitchen {comfy-kitchen} INT8",
    "`auto`": "`auto`, while grouping / after",
}
# of ours a grouped step, whose kernel does more; a peer has its call alone
OUR_COLUMNS = ("kernel grouped over cuDNN", "in turns over cuDNN", "call grouped over cuDNN", "relative L2")
PEER_COLUMNS = (None, "in turns over cuDNN", "call over cuDNN", "relative L2")


def table(stage, title):
    return rows_of(results(stage), title)


def quoted(column, values):
    """A cell: the numbers of both lengths."""
    if values[0] is None:
        return "–"
    return " / ".join(f"{value:.3f}" if column == "relative L2" else f"{value:.2f}x" for value in values)


def speed_lines():
    facts = results("speed")["measured_on"]
    size = " / ".join(f"{tokens:,}" for tokens in TOKENS)
    where = f"{facts['card']}, {facts['date']}, {facts['commit']}; {size} tokens"
    lines = [f"| {where} | kernel, over cuDNN | taking turns | with its preparation | relative L2 |"]
    rows = {(row["kernel"], row["tokens"], row["heads"]): row for row in table("speed", "Speed over length")}
    for name, shown in ROWS.items():
        if (name, TOKENS[0], HEADS) not in rows:
            continue  # a package that was not installed
        both = [rows[name, tokens, HEADS] for tokens in TOKENS]
        columns = OUR_COLUMNS if both[0][OUR_COLUMNS[0]] is not None else PEER_COLUMNS
        cells = [quoted(column, [row.get(column) for row in both]) for column in columns]
        lines.append(f"| {shown.format(**facts)} | {' | '.join(cells)} |")
    return lines


def shape_lines():
    """Speed at the paper's shapes, over cuDNN and over the paper's baseline: a table and a sentence."""
    shapes = table("speed", "The paper's shapes")
    rows = [row for row in shapes if row["kernel"] == "cuda_int8_fp8_sm90"]
    rows = [row for row in rows if row["tensors"].endswith(("N(0, 1)", "captured"))]
    flash4 = {row["tensors"]: row["call ms"] for row in shapes if row["kernel"] == "FlashAttention-4"}
    sizes = [f"{row['tokens']:,} x {row['heads']}" for row in rows[:-1]]
    over = [f"{row['kernel grouped over cuDNN']:.2f}x" for row in rows]
    calls = [f"{flash4[row['tensors']] / row['call grouped ms']:.2f}x" for row in rows]
    kernel = flash4[rows[0]["tensors"]] / rows[0]["kernel grouped ms"]
    return [
        f"| the paper's shapes, tokens x heads | {' | '.join(sizes)} | the first, captured tensors |",
        f"| `auto`'s kernel over cuDNN | {' | '.join(over)} |",
        f"| its whole call over FlashAttention-4 | {' | '.join(calls)} |",
        f"The first one's kernel alone is {kernel:.2f}x FlashAttention-4 (the paper: 1.46x).",
    ]


def order_sentence():
    """What an order costs."""
    shares = {
        row["what"]: row["of the kernel, %"]
        for row in table("speed", "Order time")
        if row["clusters"] == 128 and row["Lloyd steps"] == "as shipped"
    }
    return (
        f"A token order takes {shares['k-means']:.1f}% of one call's kernel, "
        f"{shares['k-means, warm']:.1f}% when made from the one before."
    )


def clip_sentence():
    """Clips by what `auto` and `expcast off` run on an H200, and by packages."""
    rows = {row["method"]: row for row in table("clips", "Clips by method")}
    measured = {shown: rows[name] for shown, name in CLIPS.items() if name in rows}
    numbers = [f"{shown} {row['PSNR']:.1f} / {1e3 * row['GMSD']:.1f}" for shown, row in measured.items()]
    return (
        f"{measured['`auto`']['clips']} clips of the sample model against exact attention's, PSNR in dB and "
        f"GMSD in thousandths: {', '.join(numbers)}."
    )


def model_sentence():
    """What was run of whole models, and what attention for nothing would give."""
    rows = {row["model"]: row for row in table("models", "Whole clips") if row["attention"] == "cuDNN"}
    ran = {row["model"]: row for row in table("models", "Steps of whole models")}
    blocks = " and ".join(f"{ran[model]['blocks']} of {ran[model]['all blocks']}" for model in MODELS)
    limits = " and ".join(f"{rows[model]['limit']:.2f}x" for model in MODELS)
    commit = results("models")["measured_on"]["commit"]
    return (
        f"ComfyUI 0.33's sampler, {commit}; **extrapolated** from {blocks} blocks. The limit, attention that "
        f"takes no time, would be {limits} cuDNN's speed."
    )


def model_lines():
    """The table of whole models: a step, a clip, and how much faster `auto` makes it."""
    facts = results("models")["measured_on"]
    steps = {(row["model"], row["attention"].partition(":")[0]): row["step of all blocks s"]
             for row in table("models", "Steps of whole models")}  # fmt: skip
    clips = {(row["model"], row["attention"]): row for row in table("models", "Whole clips")}
    lines = []
    for name, shown in ATTENTIONS.items():
        if any((model, name) not in clips for model in MODELS):
            continue  # a package that was not installed
        cells = []
        for model in MODELS:
            clip = clips[model, name]
            ours = [f"{name.strip('`')}, {state}" for state in ("grouped", "plain")]
            times = [steps[model, each] for each in ([name] if (model, name) in steps else ours)]
            shown_s = " / ".join(f"{each:.2f}" if each < 10 else f"{each:.1f}" for each in times)
            faster = clip["`auto` over it"]
            cells += [f"{shown_s} s", f"{clip['clip s']:.0f} s", "" if faster is None else f"{faster:.2f}x"]
        # what is over itself stays empty
        lines.append(f"| {shown.format(**facts)} | {' | '.join(cells)} |".replace("|  |", "| |"))
    return lines


def longest_sentence():
    sizes = {(row["heads"], row["keys"]) for row in table("length", "Length")}
    most = max(heads for heads, _ in sizes)
    few, many = max(sizes, key=lambda size: size[1]), max(size for size in sizes if size[0] == most)
    return f"to {few[1]:,} keys ({few[0]} heads) and {many[1]:,} tokens ({many[0]} heads)"


def run(device, out=None, weights=None):
    """Print them all."""
    models = [model_sentence(), *model_lines()]
    speed = [*speed_lines(), *shape_lines(), order_sentence()]
    print("\n".join([*speed, clip_sentence(), *models, longest_sentence()]))
