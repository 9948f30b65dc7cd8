"""Every Triton kernel compiles for every card it is offered on, without one: types, layouts, ptxas limits."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

ARCHES = (80, 86, 89, 90, 100, 103, 120)
KB_OF_SHARED = {80: 163, 90: 227, 100: 227, 103: 227}  # of a block; 99 elsewhere
# Bytes of stack, so of spilled registers, at most; measured with Triton 3.6 and 3.8.
# Of 128 threads, 255 registers do not hold 64 rows of the attention kernels; on sm_90 and sm_103 the
# accumulators lie elsewhere or are fewer. 32 rows, as int8_int8 has them elsewhere, fit.
STACK_BYTES = {"attend": 512, "assign": 192, "sum": 32, "q": 32, "k": 32}
NO_STACK = (90, 103)


def rows_of(arch):
    """One dict for each build. In a process of its own: this one may run the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, __file__, str(arch)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("arch", ARCHES)
def test_compiles(arch):
    rows = rows_of(arch)
    assert len(rows) > 10
    for row in rows:
        assert row["shared"] <= KB_OF_SHARED.get(arch, 99) * 1024, row
        assert row["registers"] * row["threads"] <= 65536, row
        limit = 0 if arch in NO_STACK else STACK_BYTES.get(row["build"].split()[0], 0)
        assert row["stack"] <= limit, row
        if row["build"] == "attend int8_int8" and arch != 100:
            assert row["stack"] <= 32, row  # 0 with Triton 3.6


def test_every_row_of_the_registry_has_its_builds():
    from comfyui_vc_attention.kernels import KERNELS
    from comfyui_vc_attention.kernels.triton_builds import builds, offered_to

    for spec in KERNELS:
        if spec.name.startswith("triton"):
            kinds = {build.name.split()[0] for build in builds(120, spec.name)}
            assert {"q", "k", "v", "attend", "assign", "scatter"} <= kinds, spec.name
    assert offered_to(103) == {"triton_fp8_fp8"} and offered_to(86) == {"triton_int8_int8"}


def print_rows(arch):
    from comfyui_vc_attention.kernels.cubin import resources
    from comfyui_vc_attention.kernels.triton_builds import builds, compile_build

    for build in builds(arch):
        compiled = compile_build(build, arch)
        (used,) = resources(compiled.asm["cubin"]).values()
        row = {"build": build.name, "arch": f"sm_{arch}", "threads": 32 * build.warps}
        row |= {"registers": used.registers, "stack": used.stack_bytes, "shared": compiled.metadata.shared}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import conftest  # noqa: F401, gives the checkout its import name

    print_rows(int(sys.argv[1]))
