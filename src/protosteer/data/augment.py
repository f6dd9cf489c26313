"""Training augmentation: the list of the paper's appendix, in its order, drawn anew for every image.

Three choices that the list leaves open:

- The crop is resized as Pillow does it: uint8, antialiased, horizontally first; see transforms.py.
- Colour jitter has torchvision's meaning, in which the paper's figures are stated: brightness multiplies,
  contrast mixes with the mean grey, saturation with the grey image, hue turns the HSV circle, and every
  image goes through them in its own random order. kornia's ColorJitter draws one order per batch, and its
  hue step alone took longer than everything here together, hence the formulas below.
- The blur radius is a standard deviation in pixels of a 224-pixel image. It shrinks along with smaller
  images: two pixels would wipe out an image of 32.

Images are treated one by one because one image stays in the processor's cache and a batch does not.
"""

from __future__ import annotations

import math

import torch
from kornia.augmentation import RandomResizedCrop
from kornia.color import rgb_to_grayscale
from kornia.filters import gaussian_blur2d
from torch import Tensor

from protosteer.data.transforms import Preprocessing, resize
from protosteer.errors import SettingsError

KINDS = ("paper", "no-flip", "crop", "none")

CROP_SCALE = (0.8, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)
FLIP = 0.5
JITTER = 0.8
JITTER_RANGE = (0.4, 0.4, 0.2, 0.1)  # brightness, contrast, saturation around 1; hue around 0, in turns
GREY = 0.2
BLUR = 0.1
BLUR_RADIUS = (0.1, 2.0)
BLUR_IMAGE_SIZE = 224
SOLARIZE = 0.2


class Augmentation:
    """Pixels -> normalised training images; torch's global generator gives all randomness.

    kind: "paper"; "no-flip", for images that a mirror turns into something else, such as digits; "crop",
    the random crop alone; "none", the evaluation preprocessing.
    """

    def __init__(self, preprocessing: Preprocessing, kind: str = "paper"):
        if kind not in KINDS:
            raise SettingsError(f"augmentation {kind!r} is unknown; choose one of {', '.join(KINDS)}")
        self.preprocessing = preprocessing
        self.kind = kind
        size = preprocessing.image_size
        self.boxes = RandomResizedCrop((size, size), scale=CROP_SCALE, ratio=CROP_RATIO)

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [B, 3, h, w] -> float32 [B, 3, s, s]."""
        if self.kind == "none":
            return self.preprocessing(pixels)
        images = self._crop(pixels)
        if self.kind == "paper":
            mirrored = _happens(FLIP, len(images)).to(images.device)
            images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(-1), images)
        images = images.float().div_(255)
        if self.kind in ("paper", "no-flip"):
            self._recolour(images)
        return self.preprocessing.normalise(images)

    def _crop(self, pixels: Tensor) -> Tensor:
        """A box of its own for every image, resized to uint8 [B, 3, s, s]."""
        size = self.preprocessing.image_size
        corners = self.boxes.forward_parameters(pixels.shape)["src"].long()  # [B, 4, (x, y)], ends included
        crops = []
        for image, ((left, top), _, (right, bottom), _) in zip(pixels, corners.tolist(), strict=True):
            box = image[None, :, top : bottom + 1, left : right + 1]
            crops.append(resize(box, (size, size), "bicubic"))
        return torch.cat(crops)

    def _recolour(self, images: Tensor) -> None:
        """Jitter, grey, blur and solarization, in place, of floats [B, 3, s, s] in 0..1."""
        count = len(images)
        chosen = torch.stack([_happens(p, count) for p in (JITTER, GREY, BLUR, SOLARIZE)], dim=1).tolist()
        spread = torch.tensor(JITTER_RANGE)
        factors = torch.tensor([1.0, 1.0, 1.0, 0.0]) + spread * (2 * torch.rand(count, 4) - 1)
        orders = torch.rand(count, 4).argsort(dim=1).tolist()
        radii = torch.empty(count).uniform_(*BLUR_RADIUS) * (images.shape[-1] / BLUR_IMAGE_SIZE)
        for i, (jitter, grey, blur, solarized) in enumerate(chosen):
            image = images[i]
            if jitter:
                for step in orders[i]:
                    JITTER_STEPS[step](image, factors[i, step].item())
            if grey:
                image.copy_(rgb_to_grayscale(image).expand(3, -1, -1))
            if blur:
                image.copy_(gaussian_blur(image, radii[i].item()))
            if solarized:
                solarize_(image)


def _happens(probability: float, count: int) -> Tensor:
    return torch.rand(count) < probability


def brightness_(image: Tensor, factor: float) -> None:
    image.mul_(factor).clamp_(0, 1)


def contrast_(image: Tensor, factor: float) -> None:
    mean = rgb_to_grayscale(image).mean()
    image.mul_(factor).add_(mean * (1 - factor)).clamp_(0, 1)


def saturation_(image: Tensor, factor: float) -> None:
    grey = rgb_to_grayscale(image)
    image.mul_(factor).add_(grey, alpha=1 - factor).clamp_(0, 1)


def hue_(image: Tensor, turns: float) -> None:
    """Turns the HSV hue without going through HSV.

    Value and chroma stay, so each channel stays between the pixel's own minimum and maximum: with the hue
    h in 0..6 (red 0, green 2, blue 4), red stands at the share |h - 3| - 1 of the way up, green at
    2 - |h - 2|, blue at 2 - |h - 4|, each cut to 0..1.
    """
    red, green, blue = image.unbind(0)
    low, high = image.amin(0), image.amax(0)
    chroma = high - low
    divisor = chroma.clamp(min=torch.finfo(image.dtype).tiny)  # grey pixels: 0 / tiny, any hue will do
    from_green = (blue - red).add_(chroma, alpha=2)
    from_blue = (red - green).add_(chroma, alpha=4)
    hue = torch.where(red == high, green - blue, torch.where(green == high, from_green, from_blue))
    hue = hue.div_(divisor).add_(6 * turns).remainder_(6)
    shares = torch.stack([(hue - 3).abs_().sub_(1), 2 - (hue - 2).abs_(), 2 - (hue - 4).abs_()])
    image.copy_(shares.clamp_(0, 1).mul_(chroma).add_(low))


JITTER_STEPS = (brightness_, contrast_, saturation_, hue_)


def gaussian_blur(image: Tensor, radius: float) -> Tensor:
    """[3, h, w]; the kernel reaches three deviations, the image's edge is continued outwards as in Pillow."""
    size = 2 * math.ceil(3 * radius) + 1
    sigma = torch.full((1, 2), radius, device=image.device)
    blurred: Tensor = gaussian_blur2d(image.unsqueeze(1), (size, size), sigma, border_type="replicate")
    return blurred.squeeze(1)


def solarize_(image: Tensor) -> None:
    """Turns the brighter half of the values upside down: from 128 of 255 on, as in Pillow."""
    image.copy_(torch.where(image < 0.5, image, 1 - image))
