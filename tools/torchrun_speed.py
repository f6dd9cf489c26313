"""Speed of training and embedding by several processes against one, as a ratio within one run.

    torchrun --standalone --nproc-per-node 2 tools/torchrun_speed.py nano --batch 64 --steps 8 --repeats 7
    torchrun --standalone --nproc-per-node 2 tools/torchrun_speed.py deit_tiny_patch16_224 --weights FILE

All ranks train the same steps together; then rank 0 trains them alone, while the others wait, and so on by turns:
whatever else the machine is doing is done to both. Prints medians, and the ratio of each pair with its quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from protosteer.backbones import Backbone
from protosteer.data.images import ArrayImages
from protosteer.paper.trainer import train_prompt
from protosteer.runtime.task_images import TaskImages
from protosteer.settings import Settings
from protosteer.util import distributed


def main(args: argparse.Namespace) -> None:
    group = distributed.join()
    torch.set_num_threads(args.threads)
    backbone = Backbone.load(args.backbone, weights=args.weights)
    count, side = args.batch * args.steps, backbone.preprocessing.canvas
    draw = torch.Generator().manual_seed(0)
    images = ArrayImages(torch.randint(256, (count, 3, side, side), generator=draw, dtype=torch.uint8))
    settings, labels = Settings.preset("paper", epochs=1, batch_size=args.batch), torch.arange(count) % 10

    def train() -> None:
        task_images = TaskImages(images, backbone, settings, "task")
        train_prompt(task_images.encoder, task_images.views, labels, settings)

    if group.is_rank0:
        print(f"{backbone.name}, {group.size} processes of {args.threads} threads against one, batch {args.batch}")
    report("training", train, args.repeats, args.steps)
    report("embedding", lambda: backbone.embed_set(images), args.repeats, count)
    group.leave()


def report(name: str, work: Callable[[], object], repeats: int, parts: int) -> None:
    cluster, single = distributed.process_group(), distributed.ProcessGroup()
    seconds: dict[distributed.ProcessGroup, list[float]] = {single: [], cluster: []}
    for repeat in range(repeats + 1):
        for group in (single, cluster) if repeat % 2 else (cluster, single):
            cluster.broadcast_object(lambda: None)  # other ranks wait here while rank 0 works alone
            began = time.perf_counter()
            if group is cluster or cluster.is_rank0:
                distributed._group = group
                work()
                distributed._group = cluster
            if repeat:  # the first is for warming up
                seconds[group].append(time.perf_counter() - began)
    if not cluster.is_rank0:
        return
    ratios = sorted(s / c for s, c in zip(seconds[single], seconds[cluster], strict=True))
    lower, middle, upper = statistics.quantiles(ratios, n=4)
    single_ms, cluster_ms = (statistics.median(seconds[member]) / parts * 1000 for member in (single, cluster))
    times = f"{single_ms:.1f} ms alone, {cluster_ms:.1f} ms together"
    print(f"{name}: {times}; ratio {middle:.2f}, quartiles {lower:.2f} to {upper:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbone")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    arguments = parser.parse_args()
    main(arguments)
