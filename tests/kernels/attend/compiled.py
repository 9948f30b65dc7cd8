"""What ptxas says of a CUDA source, for tests that compile without a GPU."""

import ast
import operator
import re
import struct

from comfyui_vc_attention.kernels.attend import cuda_build

ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
}

# wgmma products that ptxas runs one by one: a warning, and a third of the speed
SERIALISED = re.compile(r"C751[0-8]")


def report(source, arch, defines):
    """{kernel: (registers, spilled bytes stored)} and the whole compiler log."""
    _, log = cuda_build.compile_cubin(source, arch, defines, ("--ptxas-options=-v",))
    kernels = {}
    for part in log.split("Compiling entry function '")[1:]:
        registers = int(re.search(r"Used (\d+) registers", part).group(1))
        spilled = int(re.search(r"(\d+) bytes spill stores", part).group(1))
        kernels[part.partition("'")[0]] = (registers, spilled)
    return kernels, log


def struct_size(layout):
    """Bytes of a C struct in the struct module's letters."""
    return struct.calcsize(f"@{layout.replace(' ', '')}0P")


def packed_size(source, name):
    """Bytes that a CUDA source asserts for its struct."""
    return int(re.search(rf"static_assert\(sizeof\({name}\) == (\d+)", source).group(1))


def constant(expression, known):
    """Value of a constant expression of a CUDA source: whole numbers, names that are known, + - * / % <<."""

    def value(node):
        if isinstance(node, ast.BinOp):
            return ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        return int(known[node.id]) if isinstance(node, ast.Name) else ast.literal_eval(node)

    return value(ast.parse(str(expression).strip(), mode="eval").body)
