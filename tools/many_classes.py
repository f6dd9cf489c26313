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
class Source:
    base: Tensor  # [N, D]: unit vectors from which classes are made
    queries: Tensor  # [Q, D]: other unit vectors
    root: Tensor  # [D, D]: its square is the covariance within classes


def load_source(folder: Path, cache: Path, weights: Path | None) -> Source:
    """Load embeddings of CIFAR-100 from the file `cache`, which is written if it does not exist."""
    if not cache.exists():
        pixels, numbers, _ = read_cifar100(folder, "train")
        labels = torch.as_tensor(numbers)
        rows = torch.cat([(labels == c).nonzero()[:IMAGES, 0] for c in range(100)])
        backbone = Backbone.load("deit_tiny_patch16_224", weights=weights)
        save_file({"embeddings": backbone.embed_pixels(torch.as_tensor(pixels)[rows])}, cache)
    units = F.normalize(load_file(cache)["embeddings"], dim=1).view(100, IMAGES, -1)
    residuals = (units - units.mean(dim=1, keepdim=True)).flatten(0, 1)
    covariance = residuals.T @ residuals / (len(residuals) - 100)
    ridge = 1e-3 * covariance.trace() / len(covariance) * torch.eye(len(covariance))
    root = torch.linalg.cholesky(covariance + ridge)
    return Source(units[:, :USED].flatten(0, 1), units[:, USED:].flatten(0, 1), root)


def draw_classes(source: Source, classes: int, points: int) -> tuple[SummaryTable, Tensor]:
    """Draw summaries of random classes, and images of some of them [DRAWN, D]."""
    generator = torch.Generator().manual_seed(0)

    def noise(count: int) -> Tensor:
        return torch.randn(count, len(source.root), generator=generator) @ source.root.T

    codes = torch.empty(classes * points, len(source.root), dtype=torch.int8)
    steps = torch.empty(classes * points, dtype=torch.half)
    query_classes, images = torch.randint(classes, (DRAWN,), generator=generator).sort().values, []
    for block in torch.arange(classes).split(DRAWN_AT_ONCE):
        first_rows, second_rows = torch.randint(len(source.base), (2, len(block)), generator=generator)
        weight = 0.5 + 0.5 * torch.rand(len(block), 1, generator=generator)
        centres = weight * source.base[first_rows] + (1 - weight) * source.base[second_rows] + 0.5 * noise(len(block))
        vectors = quantize_int8(F.normalize(centres.repeat_interleave(points, 0) + noise(len(block) * points), dim=1))
        rows, packed = slice(int(block[0]) * points, (int(block[-1]) + 1) * points), pack_prototypes(vectors)
        codes[rows], steps[rows] = packed["points"], packed["steps"]
        images.append(centres[query_classes[torch.isin(query_classes, block)] - block[0]])
    counts = torch.ones(classes * points, dtype=torch.int64)
    deviations = torch.zeros(classes, len(source.root), dtype=torch.half)
    bulk = SummaryTable(codes, counts, deviations, torch.full((classes,), points), steps)
    return bulk, F.normalize(torch.cat(images) + noise(DRAWN), dim=1)


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure(source: Source, bulk: SummaryTable, images: Tensor) -> str:
    """Measure search among these classes; return a row of the table."""
    classes = len(bulk.lengths)
    indexes: list[CoarseScorer | CandidateSearch] = []
    fit_seconds = seconds(lambda: indexes.append(CoarseScorer(bulk)))
    scorer = indexes[0]
    assert isinstance(scorer, CoarseScorer)
    vectors = scorer.whitened[0].units(scorer.statistics.means)
    build_seconds = seconds(lambda: indexes.append(CandidateSearch(vectors, CandidateOptions())))
    search = indexes[1]
    assert isinstance(search, CandidateSearch)

    def everything(queries: Tensor) -> Tensor:
        parts = queries.split(max(1, MOST_SCORES // classes))
        return torch.cat([scorer.scores(part)[0].argmax(dim=1) for part in parts])

    def candidates(queries: Tensor) -> tuple[Tensor, Tensor]:
        scored = search.find(scorer.whitened[0].units(F.normalize(queries.double(), dim=1)))
        candidate_ids, scores = scored.class_ids, scored.scores(scorer, queries)[0]
        scored.posterior(scores)
        assert candidate_ids is not None
        return candidate_ids, candidate_ids.gather(1, scored.without_sample(scores).argmax(dim=1, keepdim=True))[:, 0]

    cells = []
    for queries in (source.queries, images):
        exact_labels, (candidate_ids, candidate_labels) = everything(queries), candidates(queries)
        is_hit = (candidate_ids == exact_labels[:, None]).any(dim=1)
        assert torch.equal(candidate_labels[is_hit], exact_labels[is_hit])  # exact wherever the best is a candidate
        cells.append(f"{float(is_hit.float().mean()):.4f}")
    backbone = vit_tiny()
    picture = torch.zeros(4, 3, 224, 224)
    few_images = images[: max(1, MOST_SCORES // classes)][:BATCH]
    many_images = torch.cat([source.queries, images])[:BATCH]
    times: dict[str, list[float]] = {"pass": [], "all": [], "some": []}
    for _ in range(REPEATS + 1):
        times["pass"].append(seconds(lambda: plain_passes(backbone.vit, picture, 4)) / 4)
        times["all"].append(seconds(lambda: everything(few_images)) / len(few_images))
        times["some"].append(seconds(lambda: candidates(many_images)) / len(many_images))
    pass_ms, all_ms, candidates_ms = (1000 * median(t[1:]) for t in times.values())
    kind = type(search.search).__name__.lower()
    return (
        f"| {classes:,} | {kind} | {cells[0]} | {cells[1]} | {all_ms:.2f} | {candidates_ms:.2f} | {pass_ms:.1f} "
        f"| {100 * candidates_ms / pass_ms:.1f} % | {fit_seconds:.1f} | {build_seconds:.1f} |"
    )


def build_model(bulk: SummaryTable, backbone: Backbone, values: int = 1) -> Model:
    """Build a model of these classes, in at most a thousand tasks, as if it had been learned without prompts.

    values: how many of a class's prototypes are its value prototypes.
    """
    classes, per_class = len(bulk.lengths), int(bulk.lengths[0])
    columns = {f"plain.{name}": tensor for name, tensor in bulk.packed().items()}
    value_rows = (torch.arange(classes)[:, None] * per_class + torch.arange(values)).flatten()
    means = torch.cat([bulk.decoded(rows).half() for rows in value_rows.split(DRAWN_AT_ONCE)])
    columns |= {"values.means": means, "values.deviations": torch.zeros_like(means)}
    columns |= {"values.counts": torch.ones(len(means), dtype=torch.int64)}
    offsets = torch.arange(classes + 1)
    starts = {"values": offsets * values, "plain": offsets * per_class}
    table = ClassTable(tuple(f"class-{c}" for c in range(classes)), columns, starts)
    size = classes // min(classes // 10, 1000)
    spans = ((start, min(start + size, classes)) for start in range(0, classes, size))
    tasks = [TaskRecord(f"task-{start}", table[start:end], None) for start, end in spans]
    return Model(Path("many"), backbone_header(backbone), Settings(), Memory(tasks))


def measure_opening(path: Path, backbone: Backbone) -> str:
    """Measure the seconds to open a file of very many classes, and to build its search, at first and after a change."""
    learners = list[Learner]()
    load_seconds = seconds(lambda: learners.append(Learner.load(path, backbone)))
    (learner,) = learners

    def build_search() -> object:
        assert isinstance(learner.reader, EvidenceReader)
        return learner.reader.classifier.candidate_search

    def change() -> None:
        record = learner.memory.tasks[-1].classes[-1]
        learner.forget(record.name)
        learner.memory.add(TaskRecord("new", ClassTable.of([dataclasses.replace(record, name="new")]), None))

    ready_seconds, change_seconds, rebuild_seconds = (seconds(work) for work in (build_search, change, build_search))
    return (
        f"{len(learner.classes):,} classes: {path.stat().st_size / 1e6:.0f} MB, opened in {load_seconds:.2f} s, ready to predict "
        f"{ready_seconds:.1f} s later; one class forgotten and one added in {change_seconds:.2f} s, ready again {rebuild_seconds:.1f} s later"
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
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = load_source(options.folder, options.keep, options.weights)
    print(
        f"{CandidateOptions().candidates} candidates, of {len(source.queries)} real and {DRAWN} drawn images; milliseconds an image"
    )
    print(
        "| classes | search | found, real | found, drawn | all classes | candidates | ViT-Ti pass | share | evidence, s | lists, s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for classes in map(int, options.classes.split(",")):
        bulk, images = draw_classes(source, classes, options.points)
        print(measure(source, bulk, images), peak(), flush=True)
        if options.file:
            backbone = vit_tiny()
            build_model(bulk, backbone).write(options.file)
            del bulk
            print(peak(), "when it was written", flush=True)
            print(measure_opening(options.file, backbone), peak(), flush=True)


if __name__ == "__main__":
    main()
