"""One picture of what the training augmentation does: originals on the left, augmented versions beside them.

    python tools/contact_sheet.py --out docs/images/augmentation.png

The pictures come with scikit-learn (two photographs and the digits) or are drawn here, so that the sheet may
be shown anywhere. Images are augmented at 224 px and laid out at half that, in 256 colours, to keep the file
small. Below each version stands what happened to it besides the crop; a blur radius is in pixels of the 224.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import numpy as np
import torch
from matplotlib.font_manager import findfont
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits, load_sample_image
from torch import Tensor

from procedural import random_glyphs
from protosteer.data.augment import Augmentation, Choices
from protosteer.data.transforms import Preprocessing

SIZE = 224
VERSIONS = 9  # of each image
KIND, SEED = "paper", 0
TILE = 112
GAP = 6
HEADING, CAPTION = 34, 32  # heights of the text above the sheet and below each tile
LEVELS = Preprocessing(SIZE, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
# File, left, top and side of squares in scikit-learn's photographs of 640 x 427 pixels
SQUARES = (
    ("china.jpg", 180, 20, 300),
    ("china.jpg", 0, 187, 240),
    ("china.jpg", 90, 20, 180),
    ("flower.jpg", 190, 30, 330),
    ("flower.jpg", 250, 60, 190),
)


def originals() -> list[tuple[str, Image.Image]]:
    """Return names and pictures of one size."""
    squares = [
        Image.fromarray(load_sample_image(name)).crop((left, top, left + side, top + side))
        for name, left, top, side in SQUARES
    ]
    glyph = random_glyphs(1, torch.Generator().manual_seed(1))[0]
    digit = Image.fromarray((load_digits().images[3] * 255 / 16).astype(np.uint8)).convert("RGB")
    images = [*squares, chart(), _picture(glyph), digit]
    names = [*(f"photograph {i + 1}" for i in range(len(squares))), "chart", "glyph", "digit"]
    resized = [image.resize((SIZE, SIZE), Image.Resampling.BICUBIC) for image in images]
    return list(zip(names, resized, strict=True))


def chart() -> Image.Image:
    """Draw a hue circle, a grey wedge and stripes of growing fineness: one part for each kind of change."""
    y, x = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2
    hue = (np.arctan2(y + 24, x) / (2 * np.pi) % 1 * 255).astype(np.uint8)
    is_in_circle = np.hypot(x, y + 24) < 80
    saturation, value = np.where(is_in_circle, 150, 0), np.where(is_in_circle, 235, 200)
    channels = [hue, saturation.astype(np.uint8), value.astype(np.uint8)]
    picture = np.array(Image.fromarray(np.stack(channels, axis=2), "HSV").convert("RGB"))
    columns = np.arange(SIZE)
    picture[178:200] = (columns // 28 * 255 // 7).astype(np.uint8)[None, :, None]
    picture[200:] = np.where(np.sin(columns**2 / 90) > 0, 255, 0).astype(np.uint8)[None, :, None]
    return Image.fromarray(picture)


def step_names(choices: Choices, row: int) -> str:
    """Return the names of the steps that were drawn for one image, in the paper's order."""
    names = {
        "flip": choices.mirrored,
        "jitter": choices.jittered,
        "grey": choices.grey,
        f"blur\N{NO-BREAK SPACE}{choices.radii[row]:.1f}": choices.blurred,
        "solarize": choices.solarized,
    }
    return ", ".join(name for name, is_drawn in names.items() if is_drawn[row]) or "crop only"


def augment(image: Image.Image, versions: int) -> tuple[list[Image.Image], list[str]]:
    """Augment one image; return its versions and the names of each one's steps."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).expand(versions, -1, -1, -1)
    augmentation = Augmentation(LEVELS, KIND)
    choices = augmentation.draw(pixels.shape)
    out = augmentation.apply(pixels, choices)
    return [_picture(version) for version in out], [step_names(choices, row) for row in range(versions)]


def _picture(image: Tensor) -> Image.Image:
    return Image.fromarray(image.mul(255).round().byte().permute(1, 2, 0).numpy())


def sheet(sources: Sequence[tuple[str, Image.Image]], versions: int = VERSIONS) -> Image.Image:
    """Lay out one row per image, in 256 colours."""
    torch.manual_seed(SEED)
    across, down = TILE + GAP, TILE + CAPTION
    page = Image.new("RGB", (2 * GAP + across * (versions + 1), HEADING + down * len(sources)), "white")
    pen = ImageDraw.Draw(page)
    heading_font, caption_font = (ImageFont.truetype(findfont("DejaVu Sans"), points) for points in (14, 10))
    pen.text((GAP, 8), "original", "black", heading_font)
    heading = f"augmented at {SIZE} px, kind “{KIND}”, seed {SEED}: a random crop, and what is written below each"
    pen.text((2 * GAP + across, 8), heading, "black", heading_font)
    for row, (name, image) in enumerate(sources):
        pictures, captions = augment(image, versions)
        y = HEADING + row * down
        for column, picture in enumerate([image, *pictures]):
            x = GAP + column * across + GAP * (column > 0)  # the originals stand a little apart
            page.paste(picture.resize((TILE, TILE), Image.Resampling.BOX), (x, y))
            caption = fill([name, *captions][column], 19)
            pen.multiline_text((x, y + TILE + 2), caption, "#333333", caption_font, spacing=1)
    # Dithering, which needs a given palette, spares the sky its steps.
    return page.quantize(palette=page.quantize(256, kmeans=1), dither=Image.Dither.FLOYDSTEINBERG)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    out = parser.parse_args(arguments).out
    page = sheet(originals())
    page.save(out, optimize=True)
    print(f"wrote {out}: {page.width} x {page.height} pixels, {out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
