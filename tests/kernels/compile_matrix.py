"""Write tests/data/compile_matrix.csv: what every kernel costs on every card it is compiled for.

python tests/kernels/compile_matrix.py

Of the CUDA sources the largest numbers over all switches; registers and stack of a thread, shared memory of a
block. The tests beside this file hold every build to limits; the table is for people, and shows what a change
did to other cards.
"""

import csv
import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TABLE = TESTS / "data" / "compile_matrix.csv"
COLUMNS = ("compiler", "kernel", "card", "registers", "stack_bytes", "shared_bytes")


def cuda_rows():
    from comfyui_vc_attention.kernels.attend.cuda_build import nvrtc_version
    from test_cuda_builds import CARDS, DYNAMIC, rows_of

    largest = {}
    for card in CARDS:
        for build, kernel, used in rows_of(card, everything=True):
            shared = used.shared_bytes + (build.shared_bytes if kernel in DYNAMIC else 0)
            key = (f"NVRTC {nvrtc_version()}", f"{build.source.stem} {kernel}", build.arch)
            before = largest.get(key, (0, 0, 0))
            largest[key] = tuple(map(max, before, (used.registers, used.stack_bytes, shared)))
    return [(*key, *costs) for key, costs in largest.items()]


def triton_rows():
    import triton
    from test_triton_builds import ARCHES, rows_of

    for arch in ARCHES:
        for row in rows_of(arch):
            costs = row["registers"], row["stack"], row["shared"]
            yield f"Triton {triton.__version__}", f"triton {row['build']}", row["arch"], *costs


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [str(TESTS), str(Path(__file__).parent)]
    import conftest  # noqa: F401, gives the checkout its import name

    rows = sorted([*cuda_rows(), *triton_rows()])
    with TABLE.open("w", encoding="utf-8", newline="\n") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    print(f"{len(rows)} rows in {TABLE}")
