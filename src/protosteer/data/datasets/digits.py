"""The 8 x 8 handwritten digits of scikit-learn, which need no download."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from protosteer.data.datasets.base import NUMERALS, Benchmark, Contents, DatasetInfo, Reading, arrays, split_grey


def _read(files: Sequence[Path], reading: Reading) -> Contents:
    """Read 1,797 images of 8 x 8 pixels, half of them for testing; the source has values from 0 to 16."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.from_numpy(digits.images * (255 / 16)).round().to(torch.uint8)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    return arrays(NUMERALS, *split_grey(pixels.unsqueeze(1), labels, 0.5))


DIGITS = DatasetInfo(
    name="digits",
    title="Optical digits of scikit-learn",
    classes=10,
    licence="CC BY 4.0",
    source="https://archive.ics.uci.edu/dataset/80",
    find=lambda folder: [folder / "digits.csv.gz"],
    read=_read,
    shipped_with="sklearn",
    shipped_in="datasets/data",
    note="Half of the images of every digit are test images, drawn with a fixed seed.",
)

BENCHMARK = Benchmark("split-digits", "Split Digits", tasks=5, crop=1.0, datasets=("digits",))
