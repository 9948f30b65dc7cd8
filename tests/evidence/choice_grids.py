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
CLIP = {
    "clips": "clips",
    "PSNR, dB": "PSNR",
    "standard error": "standard error",
    "SSIM": "SSIM",
    "GMSD": "GMSD",
}
AGAINST = {"over the default, dB": "over the default", "its error": "its standard error"}
SCHEDULE = CLIP | {"over first quarter, dB": "over first quarter", "its error": "its standard error"}
SPEED = {
    "kernel, ms": "kernel ms",
    "grouped, ms": "kernel grouped ms",
    "grouped, over cuDNN": "kernel grouped over cuDNN",
    "whole call grouped, over cuDNN": "call grouped over cuDNN",
    "taking turns": "in turns over cuDNN",
}


def errors(**rows):
    """Rows of the table of errors: name=(label, method)."""
    made = {name: (label, {"method": method}) for name, (label, method) in rows.items()}
    return Grid("fidelity", "Output error", made, TENSORS)


def clips(**rows):
    """Rows of the table of clips: name=(label, method)."""
    made = {name: (label, {"method": method}) for name, (label, method) in rows.items()}
    return Grid("clips", "Clips by method", made, CLIP | AGAINST)


def schedules(recipe, **rows):
    """Rows of one recipe: name=(label, policy)."""
    made = {
        name: (f"{recipe}: {label}", {"recipe": recipe, "steps that group": policy})
        for name, (label, policy) in rows.items()
    }
    return Grid("clips", "Where grouping sits", made, SCHEDULE)


def speeds(**rows):
    """name=(label, kernel, tokens), at 40 heads."""
    made = {
        name: (f"{label}, {tokens:,} tokens", {"kernel": kernel, "tokens": tokens, "heads": 40})
        for name, (label, kernel, tokens) in rows.items()
    }
    return Grid("speed", "Speed over length", made, SPEED)


CAST, INT8 = "int8_fp8 + ExpCast", "int8_int8"
PEERS = {
    "sage1": ("SageAttention 1, our reference", "SageAttention 1"),
    "sage2": ("SageAttention 2, our reference", "SageAttention 2"),
    "kitchen": ("comfy-kitchen INT8, our reference", "comfy-kitchen INT8"),
    "package": ("comfy-kitchen INT8, the package", "comfy-kitchen INT8 (package)"),
    "torch8": ("torch FP8, our reference", "torch FP8, one scale a head"),
    "naive": ("naive FP8, our reference", "naive FP8, one scale per 128 tokens"),
    "naive_on": ("naive FP8 + QK Hadamard, our reference", "naive FP8 + QK Hadamard"),
    "qat": ("Attn-QAT, training-free, our reference", "Attn-QAT, training-free"),
    "sage3": ("SageAttention 3, our reference", "SageAttention 3"),
    "sage3_on": ("SageAttention 3 + QK Hadamard, our reference", "SageAttention 3 + QK Hadamard"),
}
SAGE2_ON = {"sage2_on": ("SageAttention 2 + QK Hadamard, our reference", "SageAttention 2 + QK Hadamard")}
SIXTEEN = {"torch": ("PyTorch, 16 bit", "PyTorch, 16 bit")}
KINDS = (("Error taken apart: structured", "structured"), ("Error taken apart: captured", "captured"))


def parts(title, **rows):
    """The terms of Eq. 2: name=(label, method)."""
    made = {name: (label, {"method": method}) for name, (label, method) in rows.items()}
    columns = {
        "from probabilities": "probability term",
        "from values": "value term",
        "values' share": "value share",
    }
    return Grid("fidelity", title, made, columns)
