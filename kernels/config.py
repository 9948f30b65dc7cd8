"""VCConfig: the user's choices, validated once. Recipe: what one call computes, all choices resolved."""

from dataclasses import dataclass

from .formats import TILE

PRECISIONS = ("8-bit", "4-bit")
EXPCAST_CHOICES = ("auto", "on", "off")
VALUE_FORMATS = ("auto", "fp8", "int8")
MAX_CLUSTERS = 256  # one-byte labels

# Cards whose exponential is slower than their tensor cores (paper 3.1): there ExpCast wins time, and costs
# error (tests/evidence/README.md, "What the H200 tables decided"); elsewhere int8_int8 has the least error.
EXPCAST_CARDS = ((9, 0), (10, 0), (10, 3))


@dataclass(frozen=True)
class VCConfig:
    """How to quantize one attention call. Raises ValueError for a combination that has no recipe.

    precision: "8-bit" or "4-bit" (NVFP4).
    expcast: write probabilities by Eq. 7 ("on"), by exp2 and a cast ("off"), or as suits the card ("auto").
    value_format: "fp8" (E4M3), "int8", or as suits the card ("auto").
    clusters: value groups per head, 1 to 256; few keys get fewer (clusters_for). 128 remove the most energy
        (tests/evidence, "Clusters and Lloyd steps").
    demean: subtract each tile's mean from its values and restore it in the softmax (Eq. 4 to 6), grouped or
        not. None: all but FP8 values, whose clips gain nothing surely by means in token order
        (ExpCast; tests/evidence, "Where grouping sits"; calls: "Output error", no means and means, sequence).
    rotate_qk: Hadamard rotation of q and k; None means on (tests/evidence, "Output error": rows "Q and K not
        rotated"; of fp8_fp8 neither wins throughout).
    smooth_k: subtract the key channel mean, which the softmax does not see ("Output error": row "K mean
        kept"); at 4 bits also quantize queries without the mean of their block of 128 rows, whose scores are
        added exactly (N3; row "nvfp4, Q not smoothed": on for captured tensors, though not all gain).
    """

    precision: str = "8-bit"
    expcast: str = "auto"
    value_format: str = "auto"
    clusters: int = 128
    demean: bool | None = True
    rotate_qk: bool | None = None
    smooth_k: bool = True

    def __post_init__(self):
        for field, known in (
            ("precision", PRECISIONS),
            ("expcast", EXPCAST_CHOICES),
            ("value_format", VALUE_FORMATS),
        ):
            if getattr(self, field) not in known:
                raise ValueError(f"{field} must be one of {', '.join(known)}, got {getattr(self, field)!r}")
        if not isinstance(self.clusters, int) or not 1 <= self.clusters <= MAX_CLUSTERS:
            raise ValueError(f"clusters must be 1 to {MAX_CLUSTERS}, got {self.clusters!r}")
        for field, known in (
            ("demean", (None, True, False)),
            ("rotate_qk", (None, True, False)),
            ("smooth_k", (True, False)),
        ):
            if getattr(self, field) not in known:
                raise ValueError(f"{field} must be one of {known}, got {getattr(self, field)!r}")
        if self.precision == "4-bit" and (self.expcast == "on" or self.value_format != "auto"):
            raise ValueError(
                "4-bit has one recipe (NVFP4, no ExpCast): set expcast to auto or off, value_format to auto; "
                f"got expcast {self.expcast!r}, value_format {self.value_format!r}"
            )
        if self.expcast == "on" and self.value_format == "int8":
            raise ValueError("ExpCast writes E4M3 probabilities: set value_format to auto or fp8, got 'int8'")

    def clusters_for(self, keys: int) -> int:
        """Clusters worth making of so many keys: halved until there are at most two for three tiles.

        A tile that holds pieces of many clusters has no mean of its own: at 12 tiles, 8 clusters remove three
        times as much of the value energy as 128 do (tests/evidence, "Clusters and Lloyd steps", captured).
        """
        tiles, clusters = -(-keys // TILE), self.clusters
        while clusters > 1 and 3 * clusters > 2 * tiles:
            clusters //= 2
        return clusters


@dataclass(frozen=True)
class Recipe:
    """One row of the numerics (kernels/README.md), with every switch resolved.

    numerics: "int8_int8", "int8_fp8", "fp8_fp8" (QK format, then PV format) or "nvfp4".
    smooth_q: queries without their block's mean (N3); nvfp4 only.
    """

    numerics: str
    expcast: bool = False
    demean: bool = True
    rotate_qk: bool = True
    smooth_k: bool = True
    smooth_q: bool = False

    @property
    def value_format(self) -> str:
        return self.numerics.rpartition("_")[2]


def resolve_demean(demean: bool | None, value_format: str) -> bool:
    """VCConfig.demean for values of one format: "int8", "fp8" or "nvfp4"."""
    return value_format != "fp8" if demean is None else demean


def resolve_recipe(
    config: VCConfig, numerics: tuple[str, ...], capability: tuple[int, int] | None, exact: bool
):
    """The recipe that config asks for among the numerics one kernel offers, or None.

    capability: compute capability of the card, None without one. exact: the kernel was chosen by name, so
    a choice left on "auto" follows the kernel; otherwise "auto" follows the card.
    """
    fast_card = capability in EXPCAST_CARDS
    if config.precision == "4-bit":
        wanted = ("nvfp4",)
    elif config.value_format != "auto":
        wanted = (config.value_format,)
    elif config.expcast == "on":
        wanted = ("fp8",)
    elif config.expcast == "auto" and fast_card:
        wanted = ("fp8", "int8") if exact else ("fp8",)
    else:
        wanted = ("int8", "fp8") if exact and config.expcast == "auto" else ("int8",)
    for value_format in wanted:
        for name in numerics:
            if name.rpartition("_")[2] != value_format:
                continue
            demean = resolve_demean(config.demean, value_format)
            rotate = config.rotate_qk is not False
            expcast = value_format == "fp8" and (
                config.expcast == "on" or (config.expcast == "auto" and fast_card)
            )
            smooth_q = name == "nvfp4" and config.smooth_k
            return Recipe(name, expcast, demean, rotate, config.smooth_k, smooth_q)
    return None
