"""What one correction costs in a service as corrections and classes grow: time under the lock, and bytes of the file.

    python tools/correction_cost.py --classes 100 1000 --images 3 --corrections 10 500 1000

The model is random, in all the layers that the backbone gives; the corrected images are random, too. A correction is
what `POST /corrections` does after the image is decoded: predict, find the weight, write the file, serve the answer.
The reader that is fitted in the background afterwards is measured by itself. Times are of the processor, in one thread.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from protosteer.backbones import Backbone
from protosteer.corrections import ImageFile
from protosteer.evaluation.manifest import circumstances
from protosteer.evidence.prototype_summary import round_to_half, summarise_class
from protosteer.learner import Learner
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskRecord
from protosteer.paper.prototypes import Centroids
from protosteer.serve.model_store import Store
from protosteer.settings import Settings

PER_TASK = 10  # classes
FIT_EVERY = 100  # corrections
REPEATS = 5


class QuietStore(Store):
    """Fits its reader when told to, so that nothing else runs while a correction is measured."""

    def _refit(self) -> None:
        self._refitting = None

    def fit(self) -> float:
        """Fit the reader; return the seconds."""
        began = time.thread_time()
        super()._refit()
        return time.thread_time() - began


def random_memory(backbone: Backbone, classes: int, images: int) -> Memory:
    """Classes of random images in the layers that the backbone gives."""
    draw = torch.Generator().manual_seed(0)
    shape = (backbone.reading("several").width // backbone.dim, backbone.dim)

    def record(number: int) -> ClassRecord:
        vectors = torch.randn(1, *shape, generator=draw) + 0.9 * torch.randn(images, *shape, generator=draw)
        summary, mean = summarise_class(vectors, number), round_to_half(vectors[:, 0].mean(dim=0, keepdim=True))
        values = Centroids(mean, torch.zeros_like(mean), torch.tensor([images]))
        return ClassRecord(f"class {number:05}", summary.points, values, plain=summary)

    starts = range(0, classes, PER_TASK)
    tables = (ClassTable.of(record(n) for n in range(s, min(s + PER_TASK, classes))) for s in starts)
    return Memory(TaskRecord(f"task {number}", table, None, True) for number, table in enumerate(tables))


def measure(backbone: Backbone, classes: int, images: int, stops: Sequence[int]) -> list[dict[str, Any]]:
    """Correct images one by one, to classes drawn at random among 20, and measure the last few before each stop."""
    learner = Learner(backbone, Settings.preset("instant"))
    learner.memory = random_memory(backbone, classes, images)
    draw, rows = torch.Generator().manual_seed(1), list[dict[str, Any]]()
    side = backbone.preprocessing.canvas
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "m.protosteer")
        learner.save(path)
        store, base_bytes = QuietStore(learner, path, writable=True), path.stat().st_size
        seconds, fit = list[float](), 0.0
        for number in range(1, max(stops) + 1):
            if number % FIT_EVERY == 0 or number - 1 + REPEATS in stops:
                fit = store.fit()
            pixels = torch.randint(0, 256, (3, side, side), generator=draw, dtype=torch.uint8)
            name = f"class {int(torch.randint(0, min(20, classes), (1,), generator=draw)):05}"
            began = time.thread_time()
            store.correct(name, pixels, ImageFile(pixels.numpy().tobytes(), f"{number}.png"))
            seconds.append(time.thread_time() - began)
            if number in stops:
                row: dict[str, Any] = {"classes": classes, "images": images, "corrections": number}
                row |= {"ms": round(1000 * median(seconds[-REPEATS:]), 1), "fit_s": round(fit, 2)}
                row |= {"bytes": path.stat().st_size, "bytes_each": round((path.stat().st_size - base_bytes) / number)}
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--images", type=int, default=3, help="of each class")
    parser.add_argument("--corrections", type=int, nargs="+", default=[10, 500, 1000])
    parser.add_argument("--backbone", default="nano")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    backbone = Backbone.load(options.backbone, weights=options.weights)
    rows = [row for n in options.classes for row in measure(backbone, n, options.images, options.corrections)]
    if options.out:
        figures = {"rows": rows, "backbone": backbone.name, "circumstances": circumstances(torch.device("cpu"))}
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
