"""What the node's widgets ask for, checked once."""

import re
from dataclasses import dataclass, replace

from ..kernels import VCConfig
from ..kernels.registry import kernel_named

# Where nothing was measured. Chosen: about where whole calls of both 8-bit choices pass cuDNN's on an H200
# (tests/evidence, "Speed over length"); other cards cross elsewhere.
DEFAULT_MIN_TOKENS = 8192
LAST_BLOCK = 9999  # chosen: far above any model's


@dataclass(frozen=True)
class PatchSettings:
    """One patch node's choices, as the run needs them."""

    config: VCConfig
    kernel: str = "auto"
    # the paper's (3.4); beside other windows and reuse: tests/evidence, "Where grouping sits (Table 3)"
    grouping_window: float = 0.25
    regroup_every: int = 4
    start_percent: float = 0.0
    end_percent: float = 1.0
    exact_blocks: frozenset[int] = frozenset()
    min_tokens: int = 0  # 0: measured_tokens, or DEFAULT_MIN_TOKENS
    measured_tokens: int = 0  # from here on the kernel is faster on this card; 0: not measured
    node_id: str | None = None  # where progress text is shown
    precision: str = ""  # as it was asked for, where config only holds what that means here

    def __post_init__(self):
        if self.start_percent > self.end_percent:
            raise ValueError(
                f"start_percent must not exceed end_percent, got {self.start_percent} and {self.end_percent}"
            )

    @property
    def by_name(self) -> bool:
        """Whether a precision or a kernel was asked for: that it cannot run is an error then."""
        return self.precision not in ("", "auto") or self.kernel != "auto"

    @property
    def hybrid(self) -> bool:
        """Whether 4 bits are for the middle of the schedule and 8 for its ends: unless the kernel that was
        asked for knows 4 bits only."""
        only_4_bit = self.kernel != "auto" and kernel_named(self.kernel).numerics == ("nvfp4",)
        return self.config.precision == "4-bit" and not only_4_bit

    @property
    def edge_config(self) -> VCConfig:
        """The config of a hybrid run's first and last steps, and of all steps where they are few."""
        return replace(self.config, precision="8-bit")

    @property
    def configs(self) -> tuple[VCConfig, ...]:
        """Every config that a run may use, apart from the tile means."""
        return (self.config, self.edge_config) if self.hybrid else (self.config,)

    @property
    def shortest(self) -> int:
        return self.min_tokens or self.measured_tokens or DEFAULT_MIN_TOKENS


def parse_blocks(text: str) -> frozenset[int]:
    """Block numbers from "0,1,38-39". Raises ValueError for anything else."""
    blocks: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:\s*-\s*(\d+))?", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"exact_blocks must list numbers and ranges like 0,1,38-39, got {text!r}")
        if int(match[2] or match[1]) > LAST_BLOCK:  # a slip of the keyboard must not fill the memory
            raise ValueError(f"exact_blocks must not exceed {LAST_BLOCK}, got {text!r}")
        blocks.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(blocks)
