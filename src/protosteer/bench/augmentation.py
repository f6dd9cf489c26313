"""The paper's augmentation on this processor: kornia's own modules for the same list against ours.

Both sides go from uint8 pixels to normalised images. Ours carries out its choices one by one or for the whole batch,
as suits the size of the images (see data/augment.py); the notes give both ways, so that one sees whether the choice
is right, and the list in Pillow, image by image, which is the reference of a training step.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import kornia.augmentation as K
import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor, nn

from protosteer.bench.timing import Ratio, interleaved
from protosteer.data import augment
from protosteer.data.augment import Augmentation, Choices
from protosteer.data.transforms import Preprocessing

TARGET = 1.0
# Name of the ratio: size of the result, size of the pixels, images.
CASES = {"augmentation": (224, 248, 32), "augmentation_nano": (32, 32, 256)}
HALF = (0.5, 0.5, 0.5)
Augment = Callable[[Tensor], Tensor]


def run(repeats: int) -> list[Ratio]:
    return [measure(name, *sizes, repeats) for name, sizes in CASES.items()]


def measure(name: str, size: int, source: int, images: int, repeats: int) -> Ratio:
    preprocessing = Preprocessing(size, HALF, HALF)
    forms: dict[str, Augment] = {
        "ours": Augmentation(preprocessing),
        "kornia's modules": kornia_modules(preprocessing),
        "Pillow": PillowAugmentation(preprocessing),
        "our batched form": Augmentation(preprocessing, batched=True),
        "ours one by one": Augmentation(preprocessing, batched=False),
    }
    random = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, source, source), dtype=torch.uint8, generator=random)

    def side(form: Augment) -> Callable[[], Tensor]:
        rounds = iter(range(repeats + 1))

        def seeded() -> Tensor:
            torch.manual_seed(next(rounds))  # in each repeat other choices, the same for all sides
            return form(pixels)

        return seeded

    with torch.random.fork_rng(), torch.no_grad():
        times = interleaved({label: side(form) for label, form in forms.items()}, repeats)
    milliseconds = {label: 1000 * median(seconds) / images for label, seconds in times.items()}
    notes = [f"{label}: {value:.2f} ms an image" for label, value in milliseconds.items()]
    about = f"the paper's augmentation, {size} px: kornia's modules / ours"
    return Ratio.of(name, about, times["kornia's modules"], times["ours"], TARGET, notes)


def kornia_modules(preprocessing: Preprocessing) -> Augment:
    """The same list and odds, as kornia offers them; its jitter has one order of steps for a whole batch."""
    size = preprocessing.image_size
    reach = int(3 * augment.BLUR_RADIUS[1] * size / augment.BLUR_IMAGE_SIZE + 1)
    radius = tuple(value * size / augment.BLUR_IMAGE_SIZE for value in augment.BLUR_RADIUS)
    steps = nn.Sequential(
        K.RandomResizedCrop(
            (size, size), augment.CROP_SCALE, augment.CROP_RATIO, resample="bicubic", align_corners=False
        ),
        K.RandomHorizontalFlip(p=augment.FLIP),
        K.ColorJitter(*augment.JITTER_RANGE, p=augment.JITTER),
        K.RandomGrayscale(p=augment.GREY),
        K.RandomGaussianBlur((2 * reach + 1, 2 * reach + 1), radius, border_type="replicate", p=augment.BLUR),
        K.RandomSolarize(thresholds=(0.5, 0.5), additions=(0.0, 0.0), p=augment.SOLARIZE),
        K.Normalize(torch.tensor(preprocessing.mean), torch.tensor(preprocessing.std)),
    )
    return lambda pixels: steps(pixels.float() / 255)


class PillowAugmentation:
    """The same list in Pillow: one image and one step after the other, in 8 bits, then a normalised tensor."""

    def __init__(self, preprocessing: Preprocessing):
        self.preprocessing = preprocessing
        self.draw = Augmentation(preprocessing).draw

    def __call__(self, pixels: Tensor) -> Tensor:
        return self.apply(pixels, self.draw(pixels.shape))

    def apply(self, pixels: Tensor, choices: Choices) -> Tensor:
        """uint8 [B, 3, h, w] -> float32 [B, 3, s, s]."""
        return torch.stack([self._tensor(self._image(pixels[i], choices, i)) for i in range(len(pixels))])

    def _image(self, pixels: Tensor, choices: Choices, i: int) -> Image.Image:
        size = self.preprocessing.image_size
        left, top, right, bottom = choices.boxes[i].tolist()
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy()).crop((left, top, right, bottom))
        image = image.resize((size, size), Image.Resampling.BICUBIC)
        if choices.mirrored[i]:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if choices.jittered[i]:
            factors = choices.factors[i].tolist()
            for step in choices.orders[i].tolist():
                image = PILLOW_JITTER[step](image, factors[step])
        if choices.grey[i]:
            image = image.convert("L").convert("RGB")
        if choices.blurred[i]:
            image = image.filter(ImageFilter.GaussianBlur(choices.radii[i].item()))
        return ImageOps.solarize(image) if choices.solarized[i] else image

    def _tensor(self, image: Image.Image) -> Tensor:
        levels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
        return self.preprocessing.normalise(levels.float().div(255))


def shift_hue(image: Image.Image, turns: float) -> Image.Image:
    hue, saturation, value = image.convert("HSV").split()
    turned = hue.point([(level + round(255 * turns)) % 256 for level in range(256)])
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


# In the order of augment.JITTER_STEPS.
PILLOW_JITTER: tuple[Callable[[Image.Image, float], Image.Image], ...] = (
    lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    shift_hue,
)
