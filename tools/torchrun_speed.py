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


def main(given: argparse.Namespace) -> None:
    group = distributed.join()
    torch.set_num_threads(given.threads)
    backbone = Backbone.load(given.backbone, weights=given.weights)
    count, side = given.batch * given.steps, backbone.preprocessing.canvas
    draw = torch.Generator().manual_seed(0)
    images = ArrayImages(torch.randint(256, (count, 3, side, side), generator=draw, dtype=torch.uint8))
    settings, labels = Settings.preset("paper", epochs=1, batch_size=given.batch), torch.arange(count) % 10

    def train() -> None:
        task_images = TaskImages(images, backbone, settings, "task")
        train_prompt(task_images.encoder, task_images.views, labels, settings)

    if group.is_rank0:
        print(f"{backbone.name}, {group.size} processes of {given.threads} threads against one, batch {given.batch}")
    report("training", train, given.repeats, given.steps)
    report("embedding", lambda: backbone.embed_set(images), given.repeats, count)
    group.leave()


def report(name: str, work: Callable[[], object], repeats: int, parts: int) -> None:
    together, alone = distributed.process_group(), distributed.ProcessGroup()
    seconds: dict[distributed.ProcessGroup, list[float]] = {alone: [], together: []}
    for repeat in range(repeats + 1):
        for group in (alone, together) if repeat % 2 else (together, alone):
            together.broadcast_object(lambda: None)  # the others wait here while rank 0 works alone
            began = time.perf_counter()
            if group is together or together.is_rank0:
                distributed._group = group
                work()
                distributed._group = together
            if repeat:  # the first is for warming up
                seconds[group].append(time.perf_counter() - began)
    if not together.is_rank0:
        return
    ratios = sorted(one / all_ for one, all_ in zip(seconds[alone], seconds[together], strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    one, all_ = (statistics.median(seconds[who]) / parts * 1000 for who in (alone, together))
    print(f"{name}: {one:.1f} ms alone, {all_:.1f} ms together; ratio {middle:.2f}, quartiles {low:.2f} to {high:.2f}")


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
