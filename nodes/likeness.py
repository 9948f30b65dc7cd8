"""How alike two clips are: PSNR and SSIM, frame by frame."""

import torch

WINDOW, SIGMA = 11, 1.5  # of the usual SSIM, as are the two constants
C1, C2 = 0.01**2, 0.03**2


def psnr(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Peak signal to noise ratio per frame, in dB: a, b [N, C, H, W] in 0..1 -> float64 [N]; inf if equal."""
    return -10 * (a.double() - b.double()).square().mean((1, 2, 3)).log10()


def gaussian_window(size: int, device) -> torch.Tensor:
    """float32 [size], sum 1."""
    place = torch.arange(size, dtype=torch.float32, device=device) - (size - 1) / 2
    weight = (-place.square() / (2 * SIGMA**2)).exp()
    return weight / weight.sum()


def ssim(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Structural similarity per frame: a, b [N, C, H, W] in 0..1 -> float64 [N]; 1 if equal.

    Gaussian window of 11, or of the picture's size where that is smaller; averaged over pixels and channels.
    """
    channels, size = a.shape[1], min(WINDOW, *a.shape[2:])
    window = gaussian_window(size, a.device)
    conv = torch.nn.functional.conv2d
    rows, columns = (
        window.view(shape).expand(channels, 1, -1, -1) for shape in ((1, 1, -1, 1), (1, 1, 1, -1))
    )

    def blur(x):
        return conv(conv(x, rows.expand(channels, 1, size, 1), groups=channels), columns, groups=channels)

    def one(x, y):
        # about the picture's mean: squares of what is left cancel less, and flat pictures have variance 0
        middle_x, middle_y = (each.mean((2, 3), keepdim=True) for each in (x, y))
        x, y = x - middle_x, y - middle_y
        off_x, off_y = blur(x), blur(y)
        var_x, var_y = blur(x * x) - off_x**2, blur(y * y) - off_y**2
        covariance = blur(x * y) - off_x * off_y
        mean_x, mean_y = off_x + middle_x, off_y + middle_y
        luminance = (2 * mean_x * mean_y + C1) / (mean_x**2 + mean_y**2 + C1)
        return (luminance * (2 * covariance + C2) / (var_x + var_y + C2)).double().mean()

    # one frame at a time: the blurred copies of a whole clip would be large
    return torch.stack([one(x[None], y[None]) for x, y in zip(a.float(), b.float(), strict=True)])


def frames_of_images(images: torch.Tensor) -> torch.Tensor:
    """ComfyUI's IMAGE [N, H, W, 3] -> [N, 3, H, W]."""
    return images.movedim(-1, 1)


def frames_of_latents(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two latents [B, C, (T,) h, w] -> frames [N, C, h, w], both scaled alike so that a spans 0..1."""
    low, high = a.amin(), a.amax()

    def scaled(latent):
        latent = latent if latent.ndim == 5 else latent.unsqueeze(2)
        return ((latent.float() - low) / (high - low).clamp_min(1e-12)).movedim(2, 1).flatten(0, 1)

    return scaled(a), scaled(b)
