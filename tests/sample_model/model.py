"""The Wan 2.1 text-to-video transformer in plain PyTorch, with the parameter names of ComfyUI's checkpoints.

Written so that the sample model can be trained and sampled without ComfyUI; on the same weights it gives the
same output as ComfyUI's own class (test_model.py). Shapes: B clips, H heads, L video tokens.
"""

import math

import torch
from torch import nn
from torch.nn import functional

HEAD_DIM = 128  # ComfyUI derives the number of heads from it
TIME_FREQUENCIES = 256
EPS = 1e-6
ROPE_BASE = 10000.0
ROPE_AXES = (44, 42, 42)  # channels of a head that turn with time, height and width


class WanVideoModel(nn.Module):
    """Velocity (noise - clip) of a noisy latent clip.

    forward(x, timestep, context, attention): x [B, 16, T, h, w] with even h and w, timestep [B] = 1000 sigma,
    context [B, tokens, text_dim]; returns x's shape. attention(q, k, v) on [B, H, L, 128] replaces
    scaled_dot_product_attention in the self-attention of every block.
    """

    def __init__(self, dim=256, ffn_dim=512, layers=6, channels=16, text_dim=4096):
        super().__init__()
        self.dim, self.channels = dim, channels
        self.patch_embedding = nn.Conv3d(channels, dim, kernel_size=(1, 2, 2), stride=(1, 2, 2))
        self.text_embedding = nn.Sequential(
            nn.Linear(text_dim, dim), nn.GELU(approximate="tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(nn.Linear(TIME_FREQUENCIES, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.blocks = nn.ModuleList(WanBlock(dim, ffn_dim) for _ in range(layers))
        self.head = WanHead(dim, 4 * channels)

    def forward(self, x, timestep, context, attention=functional.scaled_dot_product_attention):
        batch, channels, frames, height, width = x.shape
        grid = (frames, height // 2, width // 2)
        # a convolution whose stride is its size is a matrix product over patches, which is far faster
        patches = x.reshape(batch, channels, frames, grid[1], 2, grid[2], 2)
        patches = patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)
        tokens = functional.linear(patches, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)

        time = self.time_embedding(time_waves(timestep).to(x.dtype))
        modulation = self.time_projection(time).unflatten(1, (6, self.dim))
        context = self.text_embedding(context)
        rope = rope_angles(grid, x.device)
        for block in self.blocks:
            tokens = block(tokens, modulation, context, rope, attention)
        patches = self.head(tokens, time).unflatten(1, grid).unflatten(-1, (2, 2, self.channels))
        return patches.permute(0, 6, 1, 2, 4, 3, 5).reshape(x.shape)


class WanBlock(nn.Module):
    """Self-attention, attention to the text, feed-forward; the time embedding scales, shifts and gates."""

    def __init__(self, dim, ffn_dim):
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(1, 6, dim))
        self.norm1 = nn.LayerNorm(dim, EPS, elementwise_affine=False)
        self.self_attn = WanAttention(dim)
        self.norm3 = nn.LayerNorm(dim, EPS)
        self.cross_attn = WanAttention(dim)
        self.norm2 = nn.LayerNorm(dim, EPS, elementwise_affine=False)
        self.ffn = nn.Sequential(
            nn.Linear(dim, ffn_dim), nn.GELU(approximate="tanh"), nn.Linear(ffn_dim, dim)
        )

    def forward(self, x, modulation, context, rope, attention):
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.modulation + modulation).chunk(6, dim=1)
        y = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.self_attn(y, y, rope, attention)
        x = x + self.cross_attn(self.norm3(x), context)
        return x + gate2 * self.ffn(self.norm2(x) * (1 + scale2) + shift2)


class WanAttention(nn.Module):
    """Attention with query and key normalised over all heads together; rope turns both when it is given."""

    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(dim, eps=EPS), nn.RMSNorm(dim, eps=EPS)

    def forward(self, x, source, rope=None, attention=functional.scaled_dot_product_attention):
        q, k = self.norm_q(self.q(x)), self.norm_k(self.k(source))
        v = self.v(source)
        q, k, v = (t.unflatten(2, (-1, HEAD_DIM)).transpose(1, 2) for t in (q, k, v))
        if rope is not None:
            q, k = turn_pairs(q, *rope).to(v.dtype), turn_pairs(k, *rope).to(v.dtype)
        return self.o(attention(q.to(v.dtype), k.to(v.dtype), v).transpose(1, 2).flatten(2))


class WanHead(nn.Module):
    """The last norm, modulated by the time embedding, and the projection to patches."""

    def __init__(self, dim, out_dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, EPS, elementwise_affine=False)
        self.head = nn.Linear(dim, out_dim)
        self.modulation = nn.Parameter(torch.empty(1, 2, dim))

    def forward(self, x, time):
        shift, scale = (self.modulation + time[:, None]).chunk(2, dim=1)
        return self.head(self.norm(x) * (1 + scale) + shift)


def time_waves(timestep):
    """Cosines, then sines of the timestep at 128 geometric frequencies: float32 [B, 256]."""
    half = TIME_FREQUENCIES // 2
    exponent = torch.arange(half, dtype=torch.float32, device=timestep.device) / half
    angles = timestep.float()[:, None] * ROPE_BASE**-exponent
    return torch.cat([angles.cos(), angles.sin()], dim=1)


@torch.compiler.disable  # a compiler would recompute these float64 waves for every element, every block
def rope_angles(grid, device):
    """(cos, sin) of each token's rotation, float32 [L, 64]: pairs turn with time, then height, then width."""
    places = torch.meshgrid(*(torch.arange(n, device=device) for n in grid), indexing="ij")
    angles = []
    for place, channels in zip(places, ROPE_AXES, strict=True):
        exponent = torch.arange(0, channels, 2, dtype=torch.float64, device=device) / channels
        angles.append(place.flatten()[:, None] * ROPE_BASE**-exponent)
    angles = torch.cat(angles, dim=1)
    return angles.cos().float(), angles.sin().float()


def turn_pairs(x, cos, sin):
    """Rotate neighbouring channels (2i, 2i + 1) of x [B, H, L, 128] by each token's angles; float32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def initialise(model, seed=0):
    """Fill a model's weights for training, deterministically. Returns the model.

    Gates start small and the head starts as the inverse of the patch embedding, so the first output is about
    the noisy input: the best guess at high noise, where most of the sampling happens.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.state_dict().items():
        values = torch.empty(weight.shape)
        if name.endswith("modulation"):
            values.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            values.zero_()
        elif weight.ndim == 1:
            values.fill_(1.0)
        elif name.startswith("time_"):
            values.normal_(0.0, 0.02, generator=generator)
        else:
            fan_in, fan_out = weight[0].numel(), weight.shape[0]
            bound = math.sqrt(6.0 / (fan_in + fan_out))
            values.uniform_(-bound, bound, generator=generator)
        weight.copy_(values)
    patches = model.patch_embedding.weight.data
    columns, _ = torch.linalg.qr(torch.randn(model.dim, 4 * model.channels, generator=generator))
    patches.copy_(2.0 * columns.view_as(patches))
    # the norm before the head makes tokens of spread 2 * sqrt(patch numbers / dim) one; undo both
    inverse = columns.T.view(model.channels, 2, 2, -1).permute(1, 2, 0, 3).flatten(0, 2)
    model.head.head.weight.data.copy_(inverse * math.sqrt(4 * model.channels / model.dim))
    return model


def load_model(path, device="cpu", dtype=torch.float32):
    """The model of a checkpoint, ready to sample. Its width and depth follow from the file."""
    from safetensors.torch import load_file

    weights = load_file(str(path), device=str(device))
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blocks."))
    ffn_dim, dim = weights["blocks.0.ffn.0.weight"].shape
    channels = weights["patch_embedding.weight"].shape[1]
    with torch.device("meta"):
        model = WanVideoModel(dim, ffn_dim, layers, channels, weights["text_embedding.0.weight"].shape[1])
    model.load_state_dict(weights, assign=True)
    return model.to(dtype).eval().requires_grad_(False)
