"""Tool "draw": pictures of results that were measured before, or on a machine without matplotlib."""

from .plots import PICTURES, draw


def run(device, out, weights=None):
    """Draw every stage whose JSON file lies in out."""
    for stage in PICTURES:
        if (out / f"{stage}.json").exists():
            for picture in draw(stage, out):
                print(picture, flush=True)
