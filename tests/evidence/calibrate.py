"""Tool "calibrate": find the energy shares of structured.py again, and see how they hold at other sizes."""

from .structured import CALIBRATED, TARGET_RATIOS, TARGET_SHARES, TARGET_VALUE_MSE, calibrate, observed

GRIDS = ((16, 32, 64), (21, 30, 52), (16, 32, 32), (8, 16, 16))


def line(found, errors):
    base = errors["sequence"]
    shares = ", ".join(f"{name} {share:.4f}" for name, share in found.items())
    ratios = ", ".join(f"{name} {errors[name] / base:.4f}" for name in ("cube", "grouped"))
    return f"energy removed: {shares}; value MSE {base:.3e}; over sequence: {ratios}"


def run(device, out=None, weights=None):
    """Print the shares that meet the targets, then what they give on other grids and seeds."""
    print(f"targets {TARGET_SHARES}, value MSE {TARGET_VALUE_MSE}; predicted {TARGET_RATIOS}")
    print("as committed:", CALIBRATED, line(*observed(CALIBRATED, device=device)), flush=True)
    shares = calibrate(device=device)
    print("found:", shares, line(*observed(shares, device=device)), flush=True)
    for grid in GRIDS:
        for seed in (0, 1):
            made = observed(CALIBRATED, grid, seed=seed, device=device)
            print(f"{' x '.join(map(str, grid))}, seed {seed}:", line(*made), flush=True)
