"""Training augmentation of the paper's appendix, in its order, drawn for every image separately.

Four choices that the paper leaves open:

- The crop is resized as Pillow does it: uint8, antialiased, horizontally first; see transforms.py.
- Colour jitter has torchvision's meaning, in which the paper's figures are stated: brightness multiplies,
  contrast mixes with the mean grey, saturation with the grey image, hue turns the HSV circle, and every
  image goes through them in its own random order. kornia's ColorJitter draws one order per batch, and its
  hue step alone took longer than everything here together, hence the formulas below.
- The blur radius is a standard deviation in pixels of a 224-pixel image. It scales with the image size: two
  pixels would wipe out an image of 32.
- Solarization inverts values from 128 of 255 on, Pillow's threshold.

All random choices of a batch are drawn first, on the CPU, so that a seed means the same augmentation on every
device. They are applied in one of two ways, which differ by rounding only: to the whole batch, on a GPU and for
small images, because each operation has a fixed cost; image by image on the CPU, because a 224-pixel image stays
in the processor's cache and a batch does not (docs/reference/augmentation.md). The two stay separate functions: factors are
Python floats in one and float32 tensors in the other, and published results depend on the bits of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kornia.color import rgb_to_grayscale
from kornia.filters import gaussian_blur2d
from torch import Tensor

from protosteer.data.images import ImageSet
from protosteer.data.prefetch import prefetched
from protosteer.data.transforms import Preprocessing, resize
from protosteer.errors import SettingsError
from protosteer.settings import AUGMENTATIONS
from protosteer.util.distributed import ProcessGroup

CROP_SCALE = (0.8, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)
BOX_TRIES = 10
FLIP = 0.5
JITTER = 0.8
JITTER_RANGE = (0.4, 0.4, 0.2, 0.1)  # around NEUTRAL
NEUTRAL = (1.0, 1.0, 1.0, 0.0)  # brightness, contrast, saturation: factors; hue: turns
GREY = 0.2
BLUR = 0.1
BLUR_RADIUS = (0.1, 2.0)
BLUR_IMAGE_SIZE = 224
SOLARIZE = 0.2

MAX_BATCHED_SIZE = 64  # pixels up to which a whole batch is faster than single images on the CPU too


@dataclass
class Choices:
    """Random choices for each image of a batch, in the paper's order; all on the CPU."""

    boxes: Tensor  # int64 [B, 4]: left, top, right, bottom; the last two are exclusive
    mirrored: Tensor  # bool [B]
    jittered: Tensor  # bool [B]
    factors: Tensor  # float [B, 4], one for each of JITTER_STEPS
    orders: Tensor  # int64 [B, 4], numbers of JITTER_STEPS
    grey: Tensor  # bool [B]
    blurred: Tensor  # bool [B]
    radii: Tensor  # float [B], in pixels of the finished image
    solarized: Tensor  # bool [B]

    def of(self, rows: slice) -> Choices:
        """Select the choices of some images of the batch."""
        return Choices(**{name: choice[rows] for name, choice in vars(self).items()})


class Augmentation:
    """Turn pixels into normalised training images; all randomness comes from a CPU generator, or torch's own.

    `kind`: "paper"; "no-flip", for images that must not be mirrored, such as digits; "crop", the random crop alone;
    "none", the evaluation preprocessing. `batched`: the whole batch (True), image by image (False), or by size and
    device (None).
    """

    def __init__(self, preprocessing: Preprocessing, kind: str = "paper", batched: bool | None = None):
        if kind not in AUGMENTATIONS:
            message = f"augmentation {kind!r} is unknown; choose one of {', '.join(AUGMENTATIONS)}"
            raise SettingsError(message, code="bad-setting", name="augmentation")
        self.preprocessing = preprocessing
        self.kind = kind
        self.batched = batched

    def __call__(self, pixels: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Augment uint8 [B, 3, h, w] to float32 [B, 3, s, s] on the same device."""
        return self.apply(pixels, self.draw(pixels.shape, generator))

    def draw(self, shape: Sequence[int], generator: torch.Generator | None = None) -> Choices:
        """Draw random choices for pixels of the given shape [B, 3, h, w]; only steps of this kind are drawn.

        The order of the draws is part of what a seed means, so it must not change.
        """
        count, size = shape[0], self.preprocessing.image_size

        def happens(probability: float) -> Tensor:
            return torch.rand(count, generator=generator) < probability

        with torch.device("cpu"):
            choices = _no_change(shape)
            if self.kind != "none":
                choices.boxes = random_boxes(count, shape[2], shape[3], generator)
            if self.kind == "paper":
                choices.mirrored = happens(FLIP)
            if self.kind in ("paper", "no-flip"):
                choices.jittered = happens(JITTER)
                choices.grey = happens(GREY)
                choices.blurred = happens(BLUR)
                choices.solarized = happens(SOLARIZE)
                up_or_down = 2 * torch.rand(count, 4, generator=generator) - 1
                choices.factors = torch.tensor(NEUTRAL) + torch.tensor(JITTER_RANGE) * up_or_down
                choices.orders = torch.rand(count, 4, generator=generator).argsort(dim=1)
                radii = torch.empty(count).uniform_(*BLUR_RADIUS, generator=generator)
                choices.radii = radii * (size / BLUR_IMAGE_SIZE)
        return choices

    @torch.no_grad()
    def apply(self, pixels: Tensor, choices: Choices) -> Tensor:
        """Apply choices to uint8 [B, 3, h, w]; return float32 [B, 3, s, s]. Nothing random happens here."""
        if self.kind == "none":
            return self.preprocessing(pixels)
        size, batched = self.preprocessing.image_size, self.batched
        if batched is None:
            batched = size <= MAX_BATCHED_SIZE or pixels.device.type != "cpu"
        images = (_batched if batched else _one_by_one)(pixels, choices, size)
        return self.preprocessing.normalise(images)


def augmented(
    images: ImageSet,
    batches: Sequence[Tensor],
    augment: Augmentation,
    device: torch.device,
    group: ProcessGroup | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield normalised [B, 3, H, W] for every batch of row numbers [B], decoded ahead, newly augmented each time.

    group: of several ranks, each of which gets its own rows [b, 3, H, W] of every batch. Every rank draws the
    choices for the whole batch, so that its rows are those of a single process.
    """
    group = group or ProcessGroup()
    shares = [group.share(len(rows)) for rows in batches]
    rank_rows = [rows[share] for rows, share in zip(batches, shares, strict=True)]
    for rows, share, pixels in zip(batches, shares, prefetched(images, rank_rows, device=device), strict=True):
        choices = augment.draw((len(rows), *pixels.shape[1:]), generator)
        yield augment.apply(pixels.to(device, non_blocking=True), choices.of(share))


def _no_change(shape: Sequence[int]) -> Choices:
    count, _, height, width = shape
    boxes = torch.tensor([0, 0, width, height]).expand(count, 4)
    factors, orders = torch.tensor(NEUTRAL).expand(count, 4), torch.arange(4).expand(count, 4)
    mask = torch.zeros(count, dtype=torch.bool)
    return Choices(boxes, mask, mask, factors, orders, mask, mask, torch.zeros(count), mask)


def random_boxes(count: int, height: int, width: int, generator: torch.Generator | None) -> Tensor:
    """Draw boxes int64 [B, 4] for RandomResizedCrop: left, top, right, bottom; the last two are exclusive.

    Of `BOX_TRIES` areas and aspect ratios (width / height, log-uniform) the first that fits in the image counts. If
    none fits, the box is the largest in the middle range of ratios. Numbers are drawn in the order and arithmetic of
    kornia's RandomResizedCrop, which knows torch's own generator only.
    """

    def uniform(low: Tensor | float, high: Tensor | float, *shape: int) -> Tensor:
        return low + torch.rand(count, *shape, generator=generator) * (high - low)

    scale, limits = torch.tensor(CROP_SCALE), torch.tensor(CROP_RATIO).log()
    area = uniform(scale[0], scale[1], BOX_TRIES) * height * width  # [B, BOX_TRIES]
    ratio = uniform(limits[0], limits[1], BOX_TRIES).exp()
    sizes = torch.stack([(area * ratio).sqrt().round(), (area / ratio).sqrt().round()], dim=2)  # width, height
    fits = ((sizes > 0) & (sizes <= torch.tensor([width, height]))).all(dim=2)
    narrow, wide = width / height < CROP_RATIO[0], width / height > CROP_RATIO[1]
    full_size = [round(height * CROP_RATIO[1]) if wide else width, round(width / CROP_RATIO[0]) if narrow else height]
    fit_sizes = sizes[torch.arange(count), fits.int().argmax(dim=1)]  # [B, 2]; argmax: the first of equals
    box_sizes = torch.where(fits.any(dim=1)[:, None], fit_sizes, torch.tensor(full_size, dtype=fit_sizes.dtype))
    columns = (uniform(0.0, 1.0) * (width - box_sizes[:, 0] + 1)).floor()
    rows = (uniform(0.0, 1.0) * (height - box_sizes[:, 1] + 1)).floor()
    corner = torch.stack([columns, rows], dim=1)
    return torch.cat([corner, corner + box_sizes], dim=1).long()


def _one_by_one(pixels: Tensor, choices: Choices, size: int) -> Tensor:
    """Turn uint8 [B, 3, h, w] into floats [B, 3, s, s] in 0..1, image by image."""
    crops = [
        resize(image[None, :, top:bottom, left:right], (size, size), "bicubic")
        for image, (left, top, right, bottom) in zip(pixels, choices.boxes.tolist(), strict=True)
    ]
    images = torch.cat(crops).float().div_(255)
    orders, factors = choices.orders.tolist(), choices.factors.tolist()
    radii, reaches = choices.radii.tolist(), _reaches(choices.radii).tolist()
    for i, image in enumerate(images.unbind()):
        if choices.mirrored[i]:
            mirror_(image)
        if choices.jittered[i]:
            for step in orders[i]:
                JITTER_STEPS[step](image, factors[i][step])
        if choices.grey[i]:
            grey_(image)
        if choices.blurred[i]:
            blur_(image[None], radii[i], reaches[i])
        if choices.solarized[i]:
            solarize_(image)
    return images


def _batched(pixels: Tensor, choices: Choices, size: int) -> Tensor:
    """Do what `_one_by_one` does, each operation at once for all images that it concerns."""
    images = crop_and_resize(pixels, choices.boxes.to(pixels.device), size)

    def change(concerned: Tensor, operation: Callable[..., None], *values: Any) -> None:
        if concerned.any():
            rows = concerned.nonzero().squeeze(1).to(images.device)
            part = images[rows]
            operation(part, *values)
            images[rows] = part

    change(choices.mirrored, mirror_)
    for turn in choices.orders.unbind(1):
        for step, operation in enumerate(JITTER_STEPS):
            concerned = choices.jittered & (turn == step)
            factors = choices.factors[concerned, step].view(-1, 1, 1, 1)
            change(concerned, operation, factors.to(images.device))
    change(choices.grey, grey_)
    reaches = _reaches(choices.radii)
    for reach in reaches[choices.blurred].unique().tolist():  # kornia's kernels have one length
        concerned = choices.blurred & (reaches == reach)
        change(concerned, blur_, choices.radii[concerned], reach)
    change(choices.solarized, solarize_)
    return images


# The steps in the paper's order. Each changes floats in 0..1 in place: one image [3, h, w] with a factor, or a
# batch [b, 3, h, w] with factors [b, 1, 1, 1].


def crop_and_resize(pixels: Tensor, boxes: Tensor, size: int) -> Tensor:
    """Resize one box [left, top, right, bottom] per image as `resize` does, up to rounding.

    kornia's crop differs from Pillow's in three ways: another cubic kernel, no antialiasing, and pixels outside
    the box leak in at its edge. One matrix product per direction has none of these faults.
    """
    left, top, right, bottom = boxes.float().unbind(1)
    columns = _bicubic_weights(left, right, pixels.shape[3], size)
    rows = _bicubic_weights(top, bottom, pixels.shape[2], size)
    levels = torch.einsum("bchw,bsw->bchs", pixels.float(), columns).round_().clamp_(0, 255)
    return torch.einsum("bchw,bsh->bcsw", levels, rows).round_().clamp_(0, 255).div_(255)


def _bicubic_weights(start: Tensor, end: Tensor, length: int, size: int) -> Tensor:
    """Compute the weight [B, size, length] of each input pixel in each output pixel, as Pillow's bicubic has it."""
    positions = torch.arange(max(length, size), device=start.device) + 0.5
    start, end = start[:, None], end[:, None]
    step = (end - start) / size
    centres = start + step * positions[:size]  # [B, size]
    inputs = positions[:length]
    x = ((inputs - centres[..., None]) / step.clamp(min=1)[..., None]).abs_()
    inner, outer = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
    weights = torch.where(x < 1, inner, torch.where(x < 2, outer, 0.0))
    weights *= ((inputs > start) & (inputs < end))[:, None]
    return weights / weights.sum(2, keepdim=True)


def mirror_(image: Tensor) -> None:
    """Flip horizontally."""
    image.copy_(image.flip(-1))


def brightness_(image: Tensor, factor: float | Tensor) -> None:
    """Multiply by the factor."""
    image.mul_(factor).clamp_(0, 1)


def contrast_(image: Tensor, factor: float | Tensor) -> None:
    """Mix with the mean grey of the image."""
    mean = rgb_to_grayscale(image).mean((-3, -2, -1), keepdim=True)
    image.mul_(factor).add_(mean * (1 - factor)).clamp_(0, 1)


def saturation_(image: Tensor, factor: float | Tensor) -> None:
    """Mix with the grey image."""
    grey = rgb_to_grayscale(image)
    image.mul_(factor)
    if isinstance(factor, Tensor):
        image.add_(grey.mul_(1 - factor))
    else:
        image.add_(grey, alpha=1 - factor)
    image.clamp_(0, 1)


def hue_(image: Tensor, turns: float | Tensor) -> None:
    """Shift the HSV hue by `turns` without converting to HSV.

    Value and chroma stay, so each channel stays between the pixel's minimum and maximum. With the hue h in 0..6
    (red 0, green 2, blue 4), red is at the share |h - 3| - 1 of that range, green at 2 - |h - 2|, blue at
    2 - |h - 4|, each clipped to 0..1.
    """
    red, green, blue = image.split(1, dim=-3)
    minimum, maximum = image.amin(-3, keepdim=True), image.amax(-3, keepdim=True)
    chroma = maximum - minimum
    divisor = chroma.clamp(min=torch.finfo(image.dtype).tiny)  # grey pixels: 0 / tiny, any hue is right
    from_green = (blue - red).add_(chroma, alpha=2)
    from_blue = (red - green).add_(chroma, alpha=4)
    hue = torch.where(red == maximum, green - blue, torch.where(green == maximum, from_green, from_blue))
    hue = hue.div_(divisor).add_(6 * turns).remainder_(6)
    shares = torch.cat([(hue - 3).abs_().sub_(1), 2 - (hue - 2).abs_(), 2 - (hue - 4).abs_()], dim=-3)
    image.copy_(shares.clamp_(0, 1).mul_(chroma).add_(minimum))


JITTER_STEPS: tuple[Callable[..., None], ...] = (brightness_, contrast_, saturation_, hue_)


def grey_(image: Tensor) -> None:
    """Replace colours by grey."""
    image.copy_(rgb_to_grayscale(image).expand_as(image))


def blur_(images: Tensor, radius: float | Tensor, reach: int) -> None:
    """Blur [b, 3, h, w]; the kernel reaches `reach` pixels, and edges are replicated as in Pillow."""
    sigma = torch.as_tensor(radius).view(-1, 1).expand(-1, 2)  # kornia reads its values, so it stays on the CPU
    size = (2 * reach + 1, 2 * reach + 1)
    images.copy_(gaussian_blur2d(images, size, sigma, border_type="replicate"))


def _reaches(radii: Tensor) -> Tensor:
    """Return three standard deviations, rounded up to whole pixels."""
    return (3 * radii.double()).ceil().long()


def solarize_(image: Tensor) -> None:
    """Invert values from 128 of 255 on, as Pillow does."""
    image.copy_(torch.where(image < 0.5, image, 1 - image))
