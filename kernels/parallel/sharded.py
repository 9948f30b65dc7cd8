"""VC-Attention between an engine's exchanges: on the heads or on the keys that one rank holds."""

from ..config import VCConfig
from ..dispatch import group_tokens, plain, vc_attention


class ShardedAttention:
    """What the attention calls of one model share on one rank: the choices and the token orders.

    config, kernel: as vc_attention takes them. regroup_every: denoising steps that share one order.
    An engine's adapter calls attend(); the program that denoises calls begin_forward(). Without it every call
    uses token order and the means that config asks for.
    """

    def __init__(self, config=None, *, kernel="auto", regroup_every=4):
        self.config, self.kernel, self.regroup_every = config or VCConfig(), kernel, regroup_every
        self.groupings = {}  # (branch, call in the forward) -> (step it was made in, TokenGrouping)
        self.calls = 0
        self.step, self.branch, self.grouped = None, 0, False
        self._call = 0

    def begin_forward(self, step: int, grouped: bool, branch: int = 0) -> None:
        """Announce a forward of the model.

        step: denoising step, which tells how old an order is. grouped: whether it lies in the grouping
        window; afterwards values keep token order (dispatch.plain), and the orders are freed. branch: tells
        the forwards of one step apart (the two halves of guidance), because their values differ.
        """
        another_clip = self.step is not None and step < self.step
        if another_clip or not grouped:
            self.groupings.clear()
        self.step, self.grouped, self.branch, self._call = step, grouped, branch, 0

    def attend(self, q, k, v, *, scale=None, key_mask=None, keys_split=False, return_lse=False):
        """Attention of q over the keys on this rank; shapes, masks, result and errors are vc_attention's.

        keys_split: the keys are one shard of the sequence (ring attention). A shard keeps token order: fewer
        keys to group find less in common, and each shard would be grouped again on every rank.
        """
        self.calls += 1
        config = self.config
        if self.step is not None and not self.grouped:
            config = plain(config)
        grouping = None if keys_split else self._grouping(q, v, key_mask)
        return vc_attention(
            q, k, v, config,
            grouping=grouping, key_mask=key_mask, scale=scale, kernel=self.kernel, return_lse=return_lse,
        )  # fmt: skip

    def _grouping(self, q, v, key_mask):
        """The order of this call's values; None outside the window and for foreign keys."""
        # engines cut the padding off the keys alone: self-attention may have a few keys less than queries
        if not self.grouped or not q.shape[2] // 2 < v.shape[2] <= q.shape[2]:
            return None
        layer = (self.branch, self._call)  # every forward makes the same calls
        self._call += 1
        made_in, grouping = self.groupings.get(layer, (None, None))
        clusters = self.config.clusters_for(v.shape[2])
        if grouping is None or grouping.order.shape != v.shape[:3]:
            made_in, grouping = self.step, group_tokens(v, clusters, None, key_mask)
        elif self.step - made_in >= self.regroup_every:
            made_in, grouping = self.step, group_tokens(v, clusters, grouping, key_mask)
        self.groupings[layer] = made_in, grouping
        return grouping


def refuse(engine: str, **asked) -> None:
    """Raise ValueError if an engine asks for what VC-Attention does not have. A false value asks for nothing.

    The arguments are the same on every rank, so every rank raises and none waits for another.
    """
    wanted = [name.replace("_", " ") for name, value in asked.items() if value]
    if wanted:
        raise ValueError(f"VC-Attention in {engine} has no {', '.join(wanted)}; use another backend for it")
