"""Parts of the tables that several choices show: which rows and columns, and their labels."""

from .choices import Grid

TENSORS = {
    "N(0, 1)": "gauss",
    "structured": "structured",
    "by content": "structured, attention by content",
    "outlier tokens": "structured, outlier tokens",
    "K channels x10": "structured, K channels x10",
    "K channels x50, small Q": "structured, K channels x50, small Q",
    "logits x4": "structured, logits x4",
    "captured": "captured (mean of 9)",
}
CLIP = {"clips": "clips", "PSNR, dB": "PSNR", "SSIM": "SSIM", "GMSD": "GMSD"}
AGAINST = {"over the default, dB": "over the default", "its error": "its standard error"}
SCHEDULE = CLIP | {"over first quarter, dB": "over first quarter", "its error": "its standard error"}
SPEED = {
    "kernel, ms": "kernel ms",
    "grouped, ms": "kernel grouped ms",
    "grouped, over cuDNN": "kernel grouped over cuDNN",
    "whole call grouped, over cuDNN": "call grouped over cuDNN",
    "taking turns": "in turns over cuDNN",
}


def labelled(rows):
    """Rows as (label, row), the label empty where there is only the row's name."""
    return {name: ("", row) if isinstance(row, str) else row for name, row in rows.items()}


def methods(stage, title, columns, rows):
    """Rows of a table by method: name=method, or name=(label, method)."""
    made = {name: (label, {"method": method}) for name, (label, method) in labelled(rows).items()}
    return Grid(stage, title, made, columns)


def errors(**rows):
    return methods("fidelity", "Output error", TENSORS, rows)


def clips(**rows):
    return methods("clips", "Clips by method", CLIP | AGAINST, rows)


def parts(title, **rows):
    """The terms of Eq. 2."""
    columns = ("probability term", "value term", "value share")
    headings = ("from probabilities", "from values", "values' share")
    return methods("fidelity", title, dict(zip(headings, columns, strict=True)), rows)


def schedules(recipe, **rows):
    """Rows of one recipe: name=policy, or name=(label, policy)."""
    made = {
        name: (f"{recipe}: {label or policy}", {"recipe": recipe, "steps that group": policy})
        for name, (label, policy) in labelled(rows).items()
    }
    return Grid("clips", "Where grouping sits", made, SCHEDULE)


def speeds(columns=SPEED, **rows):
    """name=(label, kernel, tokens), at 40 heads."""
    made = {
        name: (f"{label}, {tokens:,} tokens", {"kernel": kernel, "tokens": tokens, "heads": 40})
        for name, (label, kernel, tokens) in rows.items()
    }
    return Grid("speed", "Speed over length", made, columns)


def lengths(**rows):
    """name=(label, kernel, keys)."""
    made = {
        name: (
            f"{label}, {keys:,} keys",
            {"kernel": kernel, "keys": keys, "heads": 2, "layout": "contiguous"},
        )
        for name, (label, kernel, keys) in rows.items()
    }
    return Grid("length", "Length", made, {"error": "error", "error grouped": "error grouped"})


def orders(title, *columns, **rows):
    """Rows of a table of token orders: name=(label, order). columns: besides the error of V."""
    made = {name: (label, {"order": order}) for name, (label, order) in rows.items()}
    headings = {"error of V over token order's": "over sequence"} | {each: each for each in columns}
    return Grid("fidelity", title, made, headings)


CAST, INT8 = "int8_fp8 + ExpCast", "int8_int8"
PEERS = {
    "sage1": "SageAttention 1",
    "sage2": "SageAttention 2",
    "sage2_on": "SageAttention 2 + QK Hadamard",
    "kitchen": "comfy-kitchen INT8",
    "package": "comfy-kitchen INT8 (package)",
    "torch8": "torch FP8, one scale a head",
    "naive": "naive FP8, one scale per 128 tokens",
    "naive_on": "naive FP8 + QK Hadamard",
    "qat": "Attn-QAT, training-free",
    "sage3": "SageAttention 3",
    "sage3_on": "SageAttention 3 + QK Hadamard",
}
KINDS = (("Error taken apart: structured", "structured"), ("Error taken apart: captured", "captured"))


def peers(*names, prefix=""):
    return {prefix + name: PEERS[name] for name in names}
