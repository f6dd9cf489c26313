"""What prediction among very many classes costs and misses, how long a file of them takes to open, and a change.

    python tools/many_classes.py cifar-100-python --weights deit_tiny.safetensors --classes 10000,100000,1000000 \\
        --file many.protosteer

A million classes take six minutes of processor time, 11 GB of memory and 2 GB of disk. Training images of
CIFAR-100 are embedded by DeiT-Tiny, 22 of each class. There are no data of a million classes, so classes are
drawn: the centre of each is a mixture of two of these images (ten of each class), with weights drawn from 0.5
to 1 and the rest, moved by half of the spread within real classes; its points lie about the centre as the
images of a real class do. Queries are the twelve images of each real class that took no part, and images
drawn about the centres of some classes. Seconds are processor time of one thread, so that busy neighbours do
not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
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
from protosteer.data.datasets.cifar import read_cifar100
from protosteer.evidence.prototype_summary import pack_prototypes, quantize_int8
from protosteer.evidence.scorer import CoarseScorer
from protosteer.evidence.summary_table import SummaryTable
from protosteer.learner import Learner
from protosteer.model.class_table import ClassTable
from protosteer.model.file import Model, backbone_header
from protosteer.model.memory import Memory
from protosteer.model.records import TaskRecord
from protosteer.rules import EvidenceReader
from protosteer.search.candidates import CandidateOptions, CandidateSearch
from protosteer.settings import Settings

IMAGES, USED = 22, 10  # of each real class, and how many of them classes are made of
DRAWN = 200  # queries about the centres of classes
MOST_SCORES = 10_000_000  # of images times classes at once, where all are scored
DRAWN_AT_ONCE = 10_000  # classes
BATCH, REPEATS = 128, 3


@dataclass(frozen=True)
class Real:
    base: Tensor  # [N, D]: unit vectors that classes are made of
    queries: Tensor  # [Q, D]: others
    root: Tensor  # [D, D]: its square is the covariance within classes


def embedded(folder: Path, keep: Path, weights: Path | None) -> Real:
    """keep: where embeddings are, or will be."""
    if not keep.exists():
        pixels, numbers, _ = read_cifar100(folder, "train")
        labels = torch.as_tensor(numbers)
        rows = torch.cat([(labels == c).nonzero()[:IMAGES, 0] for c in range(100)])
        backbone = Backbone.load("deit_tiny_patch16_224", weights=weights)
        save_file({"embeddings": backbone.embed_pixels(torch.as_tensor(pixels)[rows])}, keep)
    units = F.normalize(load_file(keep)["embeddings"], dim=1).view(100, IMAGES, -1)
    apart = (units - units.mean(dim=1, keepdim=True)).flatten(0, 1)
    covariance = apart.T @ apart / (len(apart) - 100)
    ridge = 1e-3 * covariance.trace() / len(covariance) * torch.eye(len(covariance))
    root = torch.linalg.cholesky(covariance + ridge)
    return Real(units[:, :USED].flatten(0, 1), units[:, USED:].flatten(0, 1), root)


def drawn(real: Real, classes: int, points: int) -> tuple[SummaryTable, Tensor]:
    """Sketches of so many classes, and images of some of them [DRAWN, D]."""
    generator = torch.Generator().manual_seed(0)

    def noise(count: int) -> Tensor:
        return torch.randn(count, len(real.root), generator=generator) @ real.root.T

    codes = torch.empty(classes * points, len(real.root), dtype=torch.int8)
    steps = torch.empty(classes * points, dtype=torch.half)
    shown, images = torch.randint(classes, (DRAWN,), generator=generator).sort().values, []
    for block in torch.arange(classes).split(DRAWN_AT_ONCE):
        one, two = torch.randint(len(real.base), (2, len(block)), generator=generator)
        weight = 0.5 + 0.5 * torch.rand(len(block), 1, generator=generator)
        centres = weight * real.base[one] + (1 - weight) * real.base[two] + 0.5 * noise(len(block))
        about = quantize_int8(F.normalize(centres.repeat_interleave(points, 0) + noise(len(block) * points), dim=1))
        rows, packed = slice(int(block[0]) * points, (int(block[-1]) + 1) * points), pack_prototypes(about)
        codes[rows], steps[rows] = packed["points"], packed["steps"]
        images.append(centres[shown[torch.isin(shown, block)] - block[0]])
    ones = torch.ones(classes * points, dtype=torch.int64)
    deviations = torch.zeros(classes, len(real.root), dtype=torch.half)
    bulk = SummaryTable(codes, ones, deviations, torch.full((classes,), points), steps)
    return bulk, F.normalize(torch.cat(images) + noise(DRAWN), dim=1)


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure(real: Real, bulk: SummaryTable, images: Tensor) -> str:
    """One row of the table."""
    classes = len(bulk.lengths)
    held: list[CoarseScorer | CandidateSearch] = []
    evidence = seconds(lambda: held.append(CoarseScorer(bulk)))
    coarse = held[0]
    assert isinstance(coarse, CoarseScorer)
    vectors = coarse.whitened[0].units(coarse.statistics.means)
    parted = seconds(lambda: held.append(CandidateSearch(vectors, CandidateOptions())))
    short = held[1]
    assert isinstance(short, CandidateSearch)

    def everything(queries: Tensor) -> Tensor:
        parts = queries.split(max(1, MOST_SCORES // classes))
        return torch.cat([coarse.scores(some)[0].argmax(dim=1) for some in parts])

    def candidates(queries: Tensor) -> tuple[Tensor, Tensor]:
        scored = short.find(coarse.whitened[0].units(F.normalize(queries.double(), dim=1)))
        found, scores = scored.class_ids, scored.scores(coarse, queries)[0]
        scored.posterior(scores)
        assert found is not None
        return found, found.gather(1, scored.without_sample(scores).argmax(dim=1, keepdim=True))[:, 0]

    cells = []
    for queries in (real.queries, images):
        best, (found, label) = everything(queries), candidates(queries)
        here = (found == best[:, None]).any(dim=1)
        assert torch.equal(label[here], best[here])  # exact wherever the best is a candidate
        cells.append(f"{float(here.float().mean()):.4f}")
    backbone = vit_tiny()
    picture = torch.zeros(4, 3, 224, 224)
    few = images[: max(1, MOST_SCORES // classes)][:BATCH]
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


def taught(bulk: SummaryTable, backbone: Backbone, values: int = 1) -> Model:
    """A model of these classes, in at most a thousand tasks, as if it had been learned without prompts.

    values: how many of a class's points are its value centroids.
    """
    classes, each = len(bulk.lengths), int(bulk.lengths[0])
    columns = {f"plain.{name}": tensor for name, tensor in bulk.packed().items()}
    own = (torch.arange(classes)[:, None] * each + torch.arange(values)).flatten()
    means = torch.cat([bulk.decoded(some).half() for some in own.split(DRAWN_AT_ONCE)])
    columns |= {"values.means": means, "values.deviations": torch.zeros_like(means)}
    columns |= {"values.counts": torch.ones(len(means), dtype=torch.int64)}
    one = torch.arange(classes + 1)
    starts = {"values": one * values, "plain": one * each}
    table = ClassTable(tuple(f"class-{c}" for c in range(classes)), columns, starts)
    size = classes // min(classes // 10, 1000)
    spans = ((first, min(first + size, classes)) for first in range(0, classes, size))
    tasks = [TaskRecord(f"task-{first}", table[first:last], None) for first, last in spans]
    return Model(Path("many"), backbone_header(backbone), Settings(), Memory(tasks))


def opening(path: Path, backbone: Backbone) -> str:
    """Seconds to open a file of very many classes, to be ready to predict, and to be so again after a change."""
    learners = list[Learner]()
    loaded = seconds(lambda: learners.append(Learner.load(path, backbone)))
    (learner,) = learners

    def ready() -> object:
        assert isinstance(learner.reader, EvidenceReader)
        return learner.reader.classifier.candidate_search

    def change() -> None:
        record = learner.memory.tasks[-1].classes[-1]
        learner.forget(record.name)
        learner.memory.add(TaskRecord("new", ClassTable.of([dataclasses.replace(record, name="new")]), None))

    first, changed, again = (seconds(work) for work in (ready, change, ready))
    return (
        f"{len(learner.classes):,} classes: {path.stat().st_size / 1e6:.0f} MB, opened in {loaded:.2f} s, ready to predict "
        f"{first:.1f} s later; one class forgotten and one added in {changed:.2f} s, ready again {again:.1f} s later"
    )


def peak() -> str:
    return f"at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB of memory so far"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with CIFAR-100 as it is published")
    parser.add_argument("--classes", default="10000,100000")
    parser.add_argument("--points", type=int, default=5, help="of each class")
    parser.add_argument("--keep", type=Path, default=Path("embeddings.safetensors"))
    parser.add_argument("--weights", type=Path, help="of DeiT-Tiny, to make embeddings with")
    parser.add_argument("--file", type=Path, help="where a model file may be written, to measure how it opens")
    given = parser.parse_args()
    torch.set_num_threads(1)
    real = embedded(given.folder, given.keep, given.weights)
    print(
        f"{CandidateOptions().candidates} candidates, of {len(real.queries)} real and {DRAWN} drawn images; milliseconds an image"
    )
    print(
        "| classes | search | found, real | found, drawn | all classes | candidates | ViT-Ti pass | share | evidence, s | lists, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for classes in map(int, given.classes.split(",")):
        bulk, images = drawn(real, classes, given.points)
        print(measure(real, bulk, images), peak(), flush=True)
        if given.file:
            backbone = vit_tiny()
            taught(bulk, backbone).write(given.file)
            del bulk
            print(peak(), "when it was written", flush=True)
            print(opening(given.file, backbone), peak(), flush=True)


if __name__ == "__main__":
    main()
