"""What prediction among very many classes costs and misses, and how long a file of them takes to open.

    python tools/many_classes.py cifar-100-python --classes 10000,100000 --keep embeddings.safetensors
    python tools/many_classes.py cifar-100-python --classes 1000000 --points 2 --keep embeddings.safetensors --no-file

Training images of CIFAR-100 are embedded by DeiT-Tiny, twelve of each class. There are no data of a million classes,
so classes are drawn: the centre of each is a mixture of two of these images (ten of each class), with weights drawn
from 0.5 to 1 and the rest, moved by half of the spread within real classes; its points lie about the centre as the
images of a real class do. Queries are the two images of each real class that took no part, and images drawn about the
centres of some classes. Seconds are processor time of one thread, so that busy neighbours do not count.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from protosteer.backbones import Backbone
from protosteer.bench.harness import vit_tiny
from protosteer.bench.prediction import plain_passes
from protosteer.data.sets.cifar import read_cifar100
from protosteer.learner import Learner
from protosteer.method import search, shortlist
from protosteer.method.evidence import Coarse
from protosteer.method.memory import Memory, TaskRecord
from protosteer.method.prototypes import coded
from protosteer.method.shortlist import Shortlist
from protosteer.method.stack import Bulk, Slices, Stack
from protosteer.modelfile import Model, backbone_header
from protosteer.settings import Settings

IMAGES, USED = 12, 10  # of each real class, and how many of them classes are made of
DRAWN = 200  # queries about the centres of classes
MOST_SCORES = 20_000_000  # of images times classes at once, where all are scored
BATCH, REPEATS = 128, 3


@dataclass(frozen=True)
class Real:
    base: Tensor  # [N, D]: unit vectors that classes are made of
    queries: Tensor  # [Q, D]: others
    root: Tensor  # [D, D]: its square is the covariance within classes


def embedded(folder: Path, keep: Path) -> Real:
    """keep: where embeddings are, or will be."""
    if not keep.exists():
        pixels, numbers, _ = read_cifar100(folder, "train")
        labels = torch.as_tensor(numbers)
        rows = torch.cat([(labels == c).nonzero()[:IMAGES, 0] for c in range(100)])
        backbone = Backbone.load("deit_tiny_patch16_224")
        save_file({"embeddings": backbone.embed_pixels(torch.as_tensor(pixels)[rows])}, keep)
    units = F.normalize(load_file(keep)["embeddings"], dim=1).view(100, IMAGES, -1)
    apart = (units - units.mean(dim=1, keepdim=True)).flatten(0, 1)
    covariance = apart.T @ apart / (len(apart) - 100)
    ridge = 1e-3 * covariance.trace() / len(covariance) * torch.eye(len(covariance))
    root = torch.linalg.cholesky(covariance + ridge)
    return Real(units[:, :USED].flatten(0, 1), units[:, USED:].flatten(0, 1), root)


def drawn(real: Real, classes: int, points: int) -> tuple[Bulk, Tensor]:
    """Sketches of so many classes, and images of some of them [DRAWN, D]."""
    generator = torch.Generator().manual_seed(0)

    def noise(count: int) -> Tensor:
        return torch.randn(count, len(real.root), generator=generator) @ real.root.T

    one, two = torch.randint(len(real.base), (2, classes), generator=generator)
    weight = 0.5 + 0.5 * torch.rand(classes, 1, generator=generator)
    centres = weight * real.base[one] + (1 - weight) * real.base[two] + 0.5 * noise(classes)
    parts = [
        coded(F.normalize(some.repeat_interleave(points, 0) + noise(len(some) * points), dim=1))
        for some in centres.split(50_000)
    ]
    some = torch.randint(classes, (DRAWN,), generator=generator)
    ones = torch.ones(classes * points, dtype=torch.int64)
    deviations = torch.zeros(classes, len(real.root))
    bulk = Bulk(torch.cat(parts), ones, deviations, torch.full((classes,), points))
    return bulk, F.normalize(centres[some] + noise(DRAWN), dim=1)


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure(real: Real, bulk: Bulk, images: Tensor) -> str:
    """One row of the table."""
    classes = len(bulk.lengths)
    held: list[Coarse | Shortlist] = []
    evidence = seconds(lambda: held.append(Coarse(bulk)))
    coarse = held[0]
    assert isinstance(coarse, Coarse)
    names = [str(c) for c in range(classes)]
    parted = seconds(lambda: held.append(Shortlist(coarse, names)))
    short = held[1]
    assert isinstance(short, Shortlist)

    def everything(queries: Tensor) -> Tensor:
        parts = queries.split(max(1, MOST_SCORES // classes // 4))
        return torch.cat([coarse.scores(some)[0].argmax(dim=1) for some in parts])

    def candidates(queries: Tensor) -> tuple[Tensor, Tensor]:
        scored = short.of(queries)
        found, scores = scored.columns, scored.scores(coarse, queries)[0]
        scored.posterior(scores)
        assert found is not None
        return found, found.gather(1, scored.candidates(scores).argmax(dim=1, keepdim=True))[:, 0]

    cells = []
    for queries in (real.queries, images):
        best, (found, label) = everything(queries), candidates(queries)
        here = (found == best[:, None]).any(dim=1)
        assert torch.equal(label[here], best[here])  # exact wherever the best is a candidate
        cells.append(f"{float(here.float().mean()):.4f}")
    backbone = vit_tiny()
    picture = torch.zeros(4, 3, 224, 224)
    few = images[: max(1, MOST_SCORES // classes // 4)][:BATCH]
    many = torch.cat([real.queries, images])[:BATCH]
    times: dict[str, list[float]] = {"pass": [], "all": [], "some": []}
    for _ in range(REPEATS + 1):
        times["pass"].append(seconds(lambda: plain_passes(backbone.vit, picture, 4)) / 4)
        times["all"].append(seconds(lambda: everything(few)) / len(few))
        times["some"].append(seconds(lambda: candidates(many)) / len(many))
    forward, every, some = (1000 * median(t[1:]) for t in times.values())
    kind = type(short.search).__name__.lower()
    return (
        f"| {classes:,} | {kind} | {cells[0]} | {cells[1]} | {every:.2f} | {some:.2f} | {forward:.1f} "
        f"| {100 * some / forward:.1f} % | {evidence:.1f} | {parted:.1f} |"
    )


def opening(bulk: Bulk) -> str:
    """Seconds to open a file of these classes, and to be ready to predict."""
    backbone, classes = vit_tiny(), len(bulk.lengths)
    tensors = {f"plain.{name}": tensor for name, tensor in bulk.packed().items()}
    means = bulk.points[:: int(bulk.lengths[0])]
    tensors |= {"values.means": means.half(), "values.deviations": torch.zeros_like(means).half()}
    tensors |= {"values.counts": torch.ones(classes, dtype=torch.int64), "held_out": torch.empty(0)}
    one = torch.arange(classes + 1)
    starts = {"values": one, "held_out": one * 0, "plain": one * int(bulk.lengths[0])}
    stack = Stack([f"class-{c}" for c in range(classes)], tensors, starts)
    each = classes // min(classes // 10, 1000)
    tasks = [
        TaskRecord(f"task-{first}", Slices(stack, first, first + each), None)
        for first in range(0, classes, each)
    ]
    model = Model(Path("many"), backbone_header(backbone), Settings(rule="evidence"), Memory(tasks))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "many.protosteer")
        model.write(path)
        size, learners = path.stat().st_size, list[Learner]()
        loaded = seconds(lambda: learners.append(Learner.load(path, backbone)))
        ready = seconds(lambda: learners[0].fusion)
    return f"{classes:,} classes: {size / 1e6:.0f} MB, opened in {loaded:.2f} s, ready to predict {ready:.1f} s later"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with CIFAR-100 as it is published")
    parser.add_argument("--classes", default="10000,100000")
    parser.add_argument("--points", type=int, default=5, help="of each class")
    parser.add_argument("--keep", type=Path, default=Path("embeddings.safetensors"))
    parser.add_argument("--no-file", action="store_true", help="do not measure how a file opens")
    given = parser.parse_args()
    torch.set_num_threads(1)
    shortlist.FROM = 1  # so that a few classes are measured, too
    real = embedded(given.folder, given.keep)
    print(f"{shortlist.CANDIDATES} candidates, {search.PROBED} lists probed; milliseconds an image")
    print(
        "| classes | search | found, real | found, drawn | all classes | candidates | ViT-Ti pass | share | evidence, s | lists, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    bulks = {}
    for classes in map(int, given.classes.split(",")):
        bulks[classes], images = drawn(real, classes, given.points)
        print(measure(real, bulks[classes], images), flush=True)
    for bulk in bulks.values() if not given.no_file else ():
        print(opening(bulk), flush=True)


if __name__ == "__main__":
    main()
