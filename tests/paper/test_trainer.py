"""Algorithm 1 against a loop written out by hand, its schedules, its head, and what it leaves alone."""

import contextlib
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from conftest import StepCallback, easy_task, tiny_backbone, train
from expect import expect_error
from protosteer.data.augment import Augmentation
from protosteer.errors import SettingsError, TrainingError
from protosteer.paper import losses
from protosteer.paper.prompts import initial_prompt
from protosteer.paper.prototypes import Anchors
from protosteer.paper.trainer import Head, learning_rate, update, weight_decay
from protosteer.runtime.callbacks import ProgressCallback
from protosteer.settings import MAX_FLOAT, Settings
from protosteer.util.training_state import epoch_batches
from vit_toys import small

QUICK = Settings.preset("paper", epochs=4, batch_size=8, neck_hidden=16, augmentation="crop")


def task(classes: int = 2, per_class: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    names = [f"class {i}" for i in range(classes)]
    pixels, labels = easy_task(names, per_class)
    return pixels, torch.tensor([names.index(label) for label in labels])


def prototypes(count: int = 6, dim: int = 24) -> Anchors:
    means = torch.randn(count, dim, generator=torch.Generator().manual_seed(5))
    return Anchors(means, torch.full((count, dim), 0.1), torch.arange(count))


@pytest.mark.parametrize(("clip", "layer"), [(5.0, 1), (0.05, 1), (5.0, 3)])
def test_training_equals_a_loop_written_out(clip, layer):
    """Batches, views, loss, clipping, rates and decay of every step, in the order in which they draw at
    random.

    Both kinds of gradient are far above the small bound, so that it decides every step. The twin knows no
    trunk: whole images go through the whole backbone, however late the prompt begins.
    """
    settings = QUICK.replace(epochs=3, gradient_clip=clip, weight_decay=0.1, final_weight_decay=0.9)
    settings = settings.replace(prompt_from_layer=layer)
    backbone, (pixels, labels) = small(depth=4), task()
    start = torch.full(backbone.prompt_shape(1, from_layer=layer), 0.1)
    earlier = prototypes(dim=backbone.dim)
    found = train(backbone, pixels, labels, settings, start=start, anchors=earlier, seed=5)

    torch.manual_seed(5)
    prompt = torch.nn.Parameter(start.clone())
    head = Head(backbone.dim, 2, settings)
    augment = Augmentation(backbone.preprocessing, "crop")
    moments = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in (prompt, *head.parameters())}
    for epoch in range(3):
        order = torch.randperm(16)
        for half in (0, 1):
            step = 2 * epoch + half
            rows = order[8 * half : 8 * half + 8]
            out = head.neck(backbone.embed(augment(pixels[rows]), prompt))
            drawn = torch.randint(6, (8,))
            noisy = F.normalize(earlier.means[drawn] + 0.1 * torch.randn(8, backbone.dim), dim=1)
            loss = losses.cpl(F.normalize(out, dim=1), labels[rows], 0.6, noisy)
            loss.backward()
            rate = 1e-6 + (1e-3 - 1e-6) * 0.5 * (1 + math.cos(math.pi * step / 5))  # a tenth of 6 steps is no warm-up
            decay = 0.9 + (0.1 - 0.9) * 0.5 * (1 + math.cos(math.pi * step / 5))
            with torch.no_grad():
                for group in ([prompt], list(head.parameters())):
                    norm = torch.cat([p.grad.flatten() for p in group]).norm()
                    for p in group:
                        gradient = p.grad * min(1.0, clip / float(norm))
                        first, second = moments[p]
                        first.mul_(0.9).add_(0.1 * gradient)
                        second.mul_(0.999).add_(0.001 * gradient**2)
                        p.mul_(1 - rate * decay)
                        correction = math.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
                        p.sub_(rate * correction * first / (second.sqrt() + 1e-8 * math.sqrt(1 - 0.999 ** (step + 1))))
                        p.grad = None
    torch.testing.assert_close(found.prompt, prompt.detach(), atol=2e-6, rtol=0)


def test_gradients_are_clipped_group_by_group():
    """Each group moves by its own clipped gradient: a large one does not shrink the other."""
    small, large = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(4))
    optimiser = torch.optim.SGD([small, large], lr=1.0)
    loss = small.sum() * 0.1 + large.sum() * 100.0
    update(loss, [[small], [large]], optimiser, clip=2.0)
    torch.testing.assert_close(small.detach(), torch.full((3,), -0.1))
    torch.testing.assert_close(large.detach(), torch.full((4,), -1.0))  # length 2, by the bound


def test_rates_and_decay_follow_their_schedule_in_the_loop():
    seen: list[tuple[float, float]] = []
    settings = QUICK.replace(epochs=10, warmup_epochs=5, warmup_fraction=0.2)

    def look(state):
        seen.append((state.optimiser.param_groups[0]["lr"], state.optimiser.param_groups[0]["weight_decay"]))

    train(tiny_backbone(), *task(), settings, callbacks=[StepCallback(look)])
    assert len(seen) == 20
    rates, decays = zip(*seen, strict=True)
    assert rates[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])  # linear over a fifth of the steps
    assert rates[11] == pytest.approx(1e-6 + (1e-3 - 1e-6) * 0.5 * (1 + math.cos(math.pi * 7 / 15)))
    assert rates[-1] == pytest.approx(1e-6)
    assert decays[7] == pytest.approx(1e-2 + (5e-4 - 1e-2) * 0.5 * (1 + math.cos(math.pi * 7 / 19)))


def test_training_changes_the_prompt_and_nothing_else():
    backbone = tiny_backbone()
    before = {name: tensor.clone() for name, tensor in backbone.vit.state_dict().items()}
    trained = train(backbone, *task(), QUICK)
    assert trained.prompt.shape == (2, 1, 24) and trained.prompt.any()
    assert all(torch.equal(before[name], tensor) for name, tensor in backbone.vit.state_dict().items())
    assert all(parameter.grad is None for parameter in backbone.vit.parameters())


def test_training_lowers_the_loss():
    settings = QUICK.replace(epochs=25, batch_size=16, augmentation="none", learning_rate=5e-3)
    trained = train(tiny_backbone(), *task(3), settings)
    assert trained.epochs[-1].loss < trained.epochs[0].loss - 0.1 and len(trained.epochs) == 25


@pytest.mark.parametrize("name", ["learning_rate", "weight_decay", "gradient_clip", "temperature"])
def test_the_greatest_setting_trains_or_is_told(name):
    """Beyond that, torch would raise anything; see `MAX_FLOAT`."""
    settings = QUICK.replace(**{name: MAX_FLOAT}, warmup_epochs=0)
    with contextlib.suppress(TrainingError):
        train(tiny_backbone(), *task(), settings)
    for value in (10 * MAX_FLOAT, 1e300, math.nan, math.inf):
        with expect_error("setting-out-of-bounds", SettingsError):
            QUICK.replace(**{name: value})


def test_same_seed_same_bits_and_the_callers_random_state_is_kept():
    backbone, data = tiny_backbone(), task()
    torch.manual_seed(123)
    state = torch.get_rng_state()
    first = train(backbone, *data, QUICK, anchors=prototypes(), seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    again = train(backbone, *data, QUICK, anchors=prototypes(), seed=1)
    other = train(backbone, *data, QUICK, anchors=prototypes(), seed=2)
    assert torch.equal(first.prompt, again.prompt) and not torch.equal(first.prompt, other.prompt)


@pytest.mark.parametrize("start", ["zero", "random"])
def test_trainings_of_several_threads_do_not_disturb_each_other(start):
    """Threads take turns after every step while another one draws from torch's own generator."""
    settings = QUICK.replace(prompt_start=start, augmentation="paper")
    seeds, backbone = (1, 2), tiny_backbone()
    alone = [train(backbone, *task(), settings, anchors=prototypes(), seed=seed).prompt for seed in seeds]
    turns = threading.Barrier(len(seeds), timeout=60)

    def wait(state):
        torch.rand(1)
        turns.wait()

    def run(seed):
        return train(backbone, *task(), settings, anchors=prototypes(), seed=seed, callbacks=[StepCallback(wait)])

    with ThreadPoolExecutor(len(seeds)) as threads:
        together = [trained.prompt for trained in threads.map(run, seeds)]
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def loss_of(z, labels, earlier, **given):
    """The loss that a setting stands for, of one batch with given prototypes."""
    sampled, sampled_labels = earlier
    kinds = {
        "supcon": lambda: losses.supcon(z, labels, 0.6),
        "uniformity": lambda: losses.cpl(z, labels, 0.6, sampled, uniformity=True),
        "none": lambda: losses.cpl(z, labels, 0.6),
        "rows": lambda: losses.cpl(z, labels, 0.6, sampled, sampled_labels + labels.max() + 1, prototype_rows=True),
        "cpl": lambda: losses.cpl(z, labels, 0.6, sampled),
    }
    return kinds[given["kind"]]()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, "cpl"),
        ({"loss": "supcon"}, "supcon"),
        ({"uniformity": True}, "uniformity"),
        ({"prototypes_per_step": 0}, "none"),
        ({"anchor_rows": "images+prototypes"}, "rows"),
    ],
    ids=str,
)
def test_the_head_takes_the_loss_that_is_asked_for(change, kind):
    torch.manual_seed(2)
    head, embeddings, labels = Head(24, 2, QUICK.replace(**change)), torch.randn(8, 24), torch.arange(8) % 2
    torch.manual_seed(7)
    found = head.loss(embeddings, labels, prototypes())
    torch.manual_seed(7)
    z = F.normalize(head.neck(embeddings), dim=1)
    torch.testing.assert_close(found, loss_of(z, labels, prototypes().sample(8), kind=kind))


def test_cross_entropy_has_a_weight_normalised_classifier_on_the_normalised_neck():
    head = Head(24, 3, QUICK.replace(loss="cross-entropy"))
    embeddings, labels = torch.randn(6, 24), torch.arange(6) % 3
    twin = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(24, 3, bias=False))
    twin.parametrizations.weight.original0.data = head.classifier.lengths.detach() * torch.tensor([[1.0], [2.0], [3.0]])
    twin.parametrizations.weight.original1.data = head.classifier.directions.detach().clone()
    assert torch.equal(head.classifier.lengths, torch.ones(3, 1))
    head.classifier.lengths.data *= torch.tensor([[1.0], [2.0], [3.0]])
    expected = F.cross_entropy(twin(F.normalize(head.neck(embeddings), dim=1)), labels)
    torch.testing.assert_close(head.loss(embeddings, labels, prototypes()), expected)
    assert all(p.requires_grad for p in head.classifier.parameters())


def test_tokens_of_a_longer_prompt_differ():
    """From zero, equal tokens stay equal for ever, as in the authors' code; by default, they do not start so."""
    found = {}
    for start in ("previous", "zero-then-previous"):
        settings = QUICK.replace(prompt_length=3, prompt_start=start)
        found[start] = train(tiny_backbone(), *task(), settings).prompt
    tokens = found["zero-then-previous"]
    assert torch.equal(tokens, tokens[:, :1].expand_as(tokens)) and tokens.abs().max() > 1e-4
    assert (found["previous"][:, 0] - found["previous"][:, 1]).abs().max() > 1e-3
    one = [train(tiny_backbone(), *task(), QUICK.replace(prompt_start=start)).prompt for start in found]
    assert torch.equal(*one)


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        ({"prompt_kind": "shallow"}, (1, 1, 24)),
        ({"prompt_length": 4}, (2, 4, 24)),
        ({"prompt_start": "random"}, (2, 1, 24)),
        ({"neck_layers": 1}, (2, 1, 24)),
        ({"loss": "cross-entropy"}, (2, 1, 24)),
    ],
    ids=str,
)
def test_every_alternative_trains(change, shape):
    trained = train(tiny_backbone(), *task(), QUICK.replace(**change), anchors=prototypes())
    assert trained.prompt.shape == shape and torch.isfinite(trained.prompt).all()
    assert trained.prompt.abs().max() > 1e-4


def test_progress_counts_every_step_to_the_end():
    stages = []
    train(tiny_backbone(), *task(), QUICK, callbacks=[ProgressCallback("spring", stages.append)])
    seen = [stage.training for stage in stages]
    assert [p.step for p in seen] == list(range(1, 9)) and seen[-1].steps == 8
    assert seen[-1].seconds_left == 0 and seen[0].accuracy is None and seen[-1].accuracy is not None
    assert (seen[-1].epoch, seen[-1].epochs) == (4, 4)
    assert (stages[2].task, stages[2].doing, stages[2].done, stages[2].total) == ("spring", "training", 3, 8)


@pytest.mark.parametrize(("classes", "per_class"), [(1, 1), (1, 3), (3, 1), (2, 2)])
def test_small_tasks_train(classes, per_class):
    trained = train(tiny_backbone(), *task(classes, per_class), QUICK, anchors=prototypes())
    assert torch.isfinite(trained.prompt).all()


def test_a_loss_that_is_not_finite_stops_training(monkeypatch):
    monkeypatch.setattr(losses, "cpl", lambda z, *rest: z.sum() * float("nan"))
    with expect_error("loss-not-finite", TrainingError, epoch=1, step=1):
        train(tiny_backbone(), *task(), QUICK)


def test_last_short_batch_is_dropped_only_when_there_is_a_full_one():
    assert [len(rows) for rows in epoch_batches(10, 4)] == [4, 4]
    assert [len(rows) for rows in epoch_batches(8, 4)] == [4, 4]
    assert [len(rows) for rows in epoch_batches(3, 4)] == [3]
    assert sorted(torch.cat(list(epoch_batches(8, 4))).tolist()) == list(range(8))


def test_schedules_start_and_end_where_the_paper_says():
    settings = Settings.preset("paper")
    steps = 50 * 20
    rates = [learning_rate(step, steps, settings) for step in range(steps)]
    assert max(rates) == pytest.approx(1e-3) and rates.index(max(rates)) == 99  # 5 epochs of warm-up
    assert rates[0] == pytest.approx(1e-5) and rates[-1] == pytest.approx(1e-6)
    assert all(a > b for a, b in zip(rates[100:], rates[101:], strict=False))
    decays = [weight_decay(step, steps, settings) for step in range(steps)]
    assert decays[0] == pytest.approx(5e-4) and decays[-1] == pytest.approx(1e-2)
    assert learning_rate(0, 1, Settings.preset("paper", epochs=1)) == pytest.approx(1e-3)


def test_warm_up_is_a_tenth_of_a_short_training():
    settings = Settings.preset("paper", epochs=10)
    rates = [learning_rate(step, 100, settings) for step in range(100)]
    assert rates.index(max(rates)) == 9


def test_neck_is_the_papers():
    head = Head(192, 10, Settings.preset("paper"))
    linears = [layer for layer in head.neck if isinstance(layer, torch.nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linears] == [(192, 2048), (2048, 2048), (2048, 192)]
    assert all(not layer.bias.any() for layer in linears)
    assert linears[1].weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert len(Head(192, 10, Settings.preset("paper", neck_layers=1)).neck) == 1


def test_head_samples_as_many_prototypes_as_images():
    drawn = []

    class Counting(Anchors):
        def sample(self, count, generator=None):
            drawn.append(count)
            return super().sample(count, generator)

    source = prototypes()
    counting = Counting(source.means, source.scales, source.labels)
    embeddings = F.normalize(torch.randn(7, 24), dim=1)
    for count in (-1, 11, 0):
        head = Head(24, 2, QUICK.replace(prototypes_per_step=count))
        head.loss(embeddings, torch.arange(7) % 2, counting)
    assert drawn == [7, 11]


def test_prompt_starts():
    backbone, previous = tiny_backbone(), torch.ones(2, 1, 24)
    assert not initial_prompt(backbone, Settings.preset("paper"), None).any()
    assert torch.equal(initial_prompt(backbone, Settings.preset("paper"), previous), previous)
    assert not initial_prompt(backbone, Settings.preset("paper", prompt_start="zero"), previous).any()
    random = initial_prompt(backbone, Settings.preset("paper", prompt_start="random"), previous)
    assert 0 < random.abs().max() < 0.1
