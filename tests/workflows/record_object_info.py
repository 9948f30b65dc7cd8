"""Write tests/data/object_info.json from a running ComfyUI that has this pack: the nodes of the workflows.

python tests/workflows/record_object_info.py http://127.0.0.1:8188
The third-party nodes already in the file are kept: they need not be installed to check the others again.
"""

import json
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tests" / "data" / "object_info.json"
KEPT = ("input", "output", "output_name", "name", "display_name", "category", "output_node")
OPTIONS = ("default", "min", "max", "options", "control_after_generate", "forceInput", "image_upload")
SERVER_FILES = {"unet_name", "clip_name", "clip_name1", "clip_name2", "vae_name", "image"}


def used_types() -> set[str]:
    """Every node type of the shipped workflows, and every node of the pack."""
    graphs = [json.loads(path.read_text()) for path in (ROOT / "workflows").glob("*.json")]
    return {node["type"] for graph in graphs for node in graph["nodes"]} - {"MarkdownNote"}


def trimmed(definition: dict) -> dict:
    """What checks need; lists of files depend on the machine, so they are emptied."""
    kept = {key: definition[key] for key in KEPT}
    kept["input"] = {
        group: {name: trimmed_input(name, spec) for name, spec in definition["input"].get(group, {}).items()}
        for group in ("required", "optional")
    }
    return kept


def trimmed_input(name: str, spec: list) -> list:
    kind = [] if name in SERVER_FILES and isinstance(spec[0], list) else spec[0]
    options = {key: value for key, value in (spec[1] if len(spec) > 1 else {}).items() if key in OPTIONS}
    return [kind, options]


def main(address: str) -> None:
    with urllib.request.urlopen(f"{address}/object_info") as answer:
        everything = json.load(answer)
    recorded = json.loads(OUT.read_text()) if OUT.exists() else {}
    wanted = used_types() | set(recorded) | {name for name in everything if name.startswith("VCAttention")}
    for name in sorted(wanted & set(everything)):
        recorded[name] = trimmed(everything[name])
    # the order of the inputs is the order of the widget values: only the nodes may be sorted
    OUT.write_text(json.dumps(dict(sorted(recorded.items())), indent=1, ensure_ascii=False) + "\n")
    missing = sorted(wanted - set(everything)) or "none"
    print(f"{len(recorded)} nodes in {OUT.name}; not on this server: {missing}")


if __name__ == "__main__":
    main(sys.argv[1])
