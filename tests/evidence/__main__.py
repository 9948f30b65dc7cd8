"""python tests/evidence [STAGE or TOOL ...]: measure, write, draw.

Stages: fidelity, clips, length, speed, models; without one all of them, one after the other. Tools: larger,
calibrate, draw, readme, choices. What a machine cannot run (no GPU, a package that is not installed) is named
in the tables. Results go to tests/evidence/results/<card>/.
"""

import argparse
import functools
import importlib
import importlib.util
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STAGES = ("fidelity", "clips", "length", "speed", "models")
TOOLS = ("larger", "calibrate", "draw", "readme", "choices")


def load_packages():
    spec = importlib.util.spec_from_file_location("evidence_packages", HERE / "packages.py")
    packages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packages)
    packages.alias_folders()
    packages.alias_pack()


def parse(argv=None):
    parser = argparse.ArgumentParser("evidence", None, __doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join((*STAGES, *TOOLS)))
    parser.add_argument("--out", type=Path, help="default: tests/evidence/results/<card>")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU if there is one")
    parser.add_argument("--commit", help="to name in the header where the checkout has no git")
    parser.add_argument("--weights", type=Path, help="larger: the folder to write to; fidelity: a file of it")
    parser.add_argument("--seconds", type=float, help="larger: how long to train; default: 240")
    options = parser.parse_args(argv)
    # not argparse's choices: up to Python 3.11 it holds the list of none against them
    unknown = set(options.stages) - {*STAGES, *TOOLS}
    if unknown:
        parser.error(
            f"no such stage: {', '.join(sorted(unknown))}; choose from {', '.join((*STAGES, *TOOLS))}"
        )
    options.stages = options.stages or list(STAGES)
    return options


def main(argv=None):
    options = parse(argv)
    load_packages()
    import torch
    from evidence import tables

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    facts = tables.environment(options.commit)
    if device.type == "cpu":
        facts["card"] = "CPU"
    out = options.out or tables.RESULTS / tables.folder_name(facts)
    for name in options.stages:
        module = importlib.import_module(f"evidence.{name}")
        if name in TOOLS:
            asked = {"seconds": options.seconds} if name == "larger" and options.seconds else {}
            module.run(device, out, options.weights, **asked)
            continue
        extra = {"larger": options.weights} if name == "fidelity" and options.weights else {}
        if name in ("fidelity", "clips", "speed"):
            extra["earlier"] = tables.unfinished(name, out, facts)
        with torch.inference_mode():
            run_stage(name, functools.partial(module.run, device, **extra), out, facts, extra.get("earlier"))
    return 0


def run_stage(name, run, out, facts, earlier):
    """Measure, write, draw. earlier: what a run that was cut short left, or None."""
    from evidence import plots, tables

    begin, before = time.perf_counter(), (earlier or {}).get("seconds", 0.0)

    def write(made, data, finished=False):
        data = {**data, "seconds": round(before + time.perf_counter() - begin, 1)}
        return tables.write(name, made, data, out, facts, finished, earlier)

    made, data = run(save=write)  # a run that is cut short leaves what it had
    if (out / f"{name}.json").exists() and not any(table.rows for table in made):
        print(f"{name}: {made[0].notes[0]} {out / name}.json stays as it is.", flush=True)
        return
    print(f"{write(made, data, finished=True)}: {time.perf_counter() - begin:.1f} s", flush=True)
    if empty := [note for table in made if not table.rows for note in table.notes]:
        print(f"{name}: {' '.join(empty)}", flush=True)
    for picture in plots.draw(name, out):
        print(picture, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
