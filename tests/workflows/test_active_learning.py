"""What to label next: greedy choice against a twin that solves from scratch, copies by their pixels, labels in doubt."""

import io

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from expect import expect_error
from photo_toys import photos, taught
from protosteer.data.class_folders import read_folder
from protosteer.errors import DataError, SettingsError
from protosteer.evidence import calibration
from protosteer.evidence.calibration import LooScores
from protosteer.evidence.kernel_ridge import RIDGE, arc_cosine
from protosteer.evidence.prototype_summary import ClassSummary
from protosteer.evidence.scorer import CoarseScorer
from protosteer.learner import Learner
from protosteer.model.class_table import ClassTable
from protosteer.model.records import ClassRecord
from protosteer.paper.prototypes import Centroids
from protosteer.prediction import Prediction
from protosteer.settings import Settings
from protosteer.workflows import active_learning, duplicates
from protosteer.workflows.active_learning import Pool, select_informative, suggest
from protosteer.workflows.duplicates import find_near_duplicates, thumbnails
from protosteer.workflows.label_issues import find_label_issues, mislabelled

INSTANT = Settings.preset("instant")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def variance_left(embeddings: torch.Tensor, doubt: torch.Tensor, labelled: list[int]) -> float:
    """Of a Gaussian process over all images once some labels are known: a solve over these, nothing updated."""
    units = F.normalize(embeddings.double(), dim=1)
    known = units[labelled]
    across = arc_cosine(units, known)
    inside = arc_cosine(known, known) + RIDGE * torch.eye(len(known), dtype=torch.double)
    variances = 1 - (across @ torch.linalg.inv(inside) * across).sum(dim=1)
    return float(variances @ doubt.double())


def test_each_choice_leaves_the_least_variance_of_images_in_doubt() -> None:
    embeddings, doubt = drawn(30, 6), drawn(30, seed=1).abs().clamp(0.01, 1)
    chosen: list[int] = []
    for _ in range(8):
        left = {i: variance_left(embeddings, doubt, [*chosen, i]) for i in range(30) if i not in chosen}
        chosen.append(min(left, key=left.__getitem__))
    assert select_informative(embeddings, doubt, 8).tolist() == chosen


def test_one_of_each_kind_is_chosen_and_first_of_the_kind_in_doubt() -> None:
    kinds = F.normalize(drawn(3, 64), dim=1).repeat_interleave(torch.tensor([8, 8, 2]), 0)
    embeddings = kinds + 0.02 * drawn(18, 64, seed=1)
    doubt = torch.tensor([0.1] * 8 + [0.9] * 8 + [0.9] * 2)
    first = select_informative(embeddings, doubt, 3).tolist()
    assert [(i >= 8) + (i >= 16) for i in first] == [1, 2, 0]


def test_no_image_is_chosen_twice_and_no_more_than_there_are() -> None:
    same = torch.ones(5, 4)
    assert sorted(select_informative(same, torch.zeros(5), 9).tolist()) == [0, 1, 2, 3, 4]
    assert select_informative(torch.empty(0, 4), torch.empty(0), 3).tolist() == []


def test_of_very_many_images_those_most_in_doubt_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings, doubt = drawn(40, 6), torch.rand(40, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(active_learning, "MAX_CANDIDATES", 10)
    rows = doubt.topk(10).indices.sort().values
    assert torch.equal(
        select_informative(embeddings, doubt, 4), rows[select_informative(embeddings[rows], doubt[rows], 4)]
    )


def test_doubt_is_how_near_the_two_likeliest_classes_are() -> None:
    def prediction(probabilities: torch.Tensor) -> Prediction:
        several, zeros = ["a"] * len(probabilities), torch.zeros(len(probabilities))
        numbers = (probabilities, probabilities, probabilities, zeros)
        return Prediction(several, several, *numbers, several, [], probabilities, zeros.long())

    seen = Pool.of([prediction(torch.tensor([[0.5, 0.5, 0.0]])), prediction(torch.tensor([[0.1, 0.2, 0.7]]))])
    assert seen.uncertainty.tolist() == pytest.approx([1.0, 0.5])
    assert seen.probabilities.tolist() == pytest.approx([0.5, 0.7])
    alone = Pool.of([prediction(torch.tensor([[1.0]]))])  # a model of one class
    assert alone.uncertainty.tolist() == [0.0]


def brute_repeats(pictures: torch.Tensor) -> dict[int, int]:
    found: dict[int, int] = {}
    for i, one in enumerate(pictures.double()):
        for j, other in enumerate(pictures[:i].double()):
            apart = float((one - other).square().mean().sqrt())
            contrast = min(float(one.std(correction=0)), float(other.std(correction=0)))
            if apart <= min(5.0, 0.2 * contrast) and j not in found and i not in found:
                found[i] = j
    return found


def test_copies_are_those_of_two_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "_BLOCK", 7)
    pictures = (128 + 40 * drawn(12, 256)).repeat(3, 1)
    pictures += torch.linspace(0, 8, 36)[:, None] * drawn(36, 256, seed=1)
    pictures[[5, 20, 30]] = 17.0  # blank ones, the same
    pictures[33] = 18.0  # blank, and another
    found = find_near_duplicates(pictures)
    assert found == brute_repeats(pictures)
    assert 0 < len(found) < 24 and found[20] == found[30] == 5 and 33 not in found


def test_a_copy_of_a_copy_stands_for_itself() -> None:
    shift = torch.full((256,), 4.0)
    first = 128 + 40 * drawn(256)
    assert find_near_duplicates(torch.stack([first, first + shift, first + 2 * shift])) == {1: 0}


def test_a_picture_saved_as_jpeg_is_a_copy_and_another_one_is_not() -> None:
    ramp = torch.linspace(0, 200, 64)
    shapes = [ramp.expand(3, 64, 64), ramp[:, None].expand(3, 64, 64), ramp.flip(0).expand(3, 64, 64)]
    pixels = torch.stack(shapes).round().to(torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels[1].permute(1, 2, 0).numpy()).resize((96, 96)).save(file, "JPEG", quality=60)
    small = Image.open(file).convert("RGB").resize((64, 64))
    copy = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(64, 64, 3).permute(2, 0, 1)
    assert find_near_duplicates(thumbnails(torch.cat([pixels, copy[None]]))) == {3: 1}


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Learner:
    place = tmp_path_factory.mktemp("suggesting")
    return taught(photos(place / "spring", ["ant", "bee", "cat"], 12), settings=INSTANT)


def test_files_are_told_apart_by_reason(known: Learner, tmp_path) -> None:
    folder = photos(tmp_path / "new", ["ant", "bee", "yak"], 6, seed=5)
    paths = sorted(folder.rglob("*.png"))
    twin = tmp_path / "new" / "twin.png"
    twin.write_bytes(paths[0].read_bytes())
    broken = tmp_path / "new" / "broken.png"
    broken.write_bytes(b"no image")
    stages: list[int] = []
    found = suggest(known, [*paths, twin, broken], 4, on_stage=lambda stage: stages.append(stage.done))
    assert found.images == 19 and stages[-1] == 20
    assert list(found.errors) == [broken]
    reasons = {why: [one for one in found.chosen if one.why == why] for why in found.found}
    assert [len(some) for some in reasons.values()] == [min(n, 4) for n in found.found.values()]
    assert [(one.path, one.other) for one in reasons["duplicate"]] == [(twin, str(paths[0]))]
    assert {one.path.parent.name for one in reasons["unknown"]} == {"yak"}
    rows = list(found.rows())
    assert rows[-1] == {"path": str(broken), "error": found.errors[broken]}
    assert {row["path"] for row in rows if row.get("why") == "label"} <= {str(path) for path in paths}
    again = suggest(known, [*paths, twin, broken], 4)
    assert again.chosen == found.chosen


def test_what_cannot_be_asked_for_is_refused(known: Learner, tmp_path) -> None:
    with expect_error("bad-count", SettingsError, value=0):
        suggest(known, ["x.png"], 0)
    with expect_error("bad-reject", SettingsError, value=1.0):
        suggest(known, ["x.png"], reject=1.0)
    with expect_error("no-images", DataError):
        suggest(known, [tmp_path / "x.png"])


def test_a_model_that_cannot_reject_calls_nothing_strange(tmp_path) -> None:
    single = taught(photos(tmp_path / "one", ["ant", "bee"], 1), settings=INSTANT)
    found = suggest(single, sorted(photos(tmp_path / "new", ["yak"], 3).rglob("*.png")), 2)
    assert found.found == {"label": 2, "unknown": 0, "duplicate": 0}


def clouds() -> tuple[torch.Tensor, list[str]]:
    centres = 1.5 * drawn(3, 10, seed=3)
    labels = [f"c{i % 3}" for i in range(24)]
    return centres.repeat(8, 1) + drawn(24, 10, seed=4), labels


@pytest.mark.parametrize("at_once", [5, 2000])
def test_labels_are_doubted_by_a_model_without_the_image(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """The twin leaves one image out of everything; shrinkage, centre and weight alone stay as they are."""
    embeddings, labels = clouds()
    labels[4], labels[7] = "c0", "c2"
    rival = ClassSummary(F.normalize(drawn(3, 10, seed=9), dim=1), torch.ones(3, dtype=torch.int64), torch.zeros(10))
    units = F.normalize(embeddings, dim=1)

    def sketches(without: int | None = None) -> list[ClassSummary]:
        own = [[i for i in range(24) if labels[i] == c and i != without] for c in ("c0", "c1", "c2")]
        parts = [ClassSummary(units[o], torch.ones(len(o), dtype=torch.int64), torch.zeros(10)) for o in own]
        return [*parts, rival]

    whole = CoarseScorer(sketches(), loo_rows=torch.arange(24))
    scores, _ = whole.loo_scores()
    (weight,) = LooScores.of([whole]).weights([0])
    monkeypatch.setattr(calibration, "max_loo_images", lambda classes: at_once)
    if at_once < 24:
        monkeypatch.setattr(LooScores, "weights", lambda self, views: [weight])
    values = Centroids(rival.points, torch.zeros_like(rival.points), rival.counts)
    rivals = ClassTable.of([ClassRecord("c3", rival.points, values, plain=rival)])
    found = {d.row: d for d in find_label_issues(embeddings, labels, rivals)}
    order = [i for c in ("c0", "c1", "c2") for i in range(24) if labels[i] == c]
    probabilities = (weight * scores).softmax(dim=1)[torch.tensor(order).argsort()]
    own = torch.tensor([int(label[1]) for label in labels])
    assert set(found) == set((probabilities.argmax(dim=1) != own).nonzero()[:, 0].tolist()) >= {4, 7}
    for row, doubt in found.items():
        assert doubt.label == f"c{int(probabilities[row].argmax())}"
        assert doubt.probability == pytest.approx(float(probabilities[row].max()))
        assert doubt.given_label_prob == pytest.approx(float(probabilities[row, own[row]]))
        ridge = CoarseScorer(sketches(row)).ridge
        assert ridge is not None
        without = ridge.scores(units[row : row + 1].double())[0]
        place = order.index(row)
        assert whole.ridge is not None
        assert torch.allclose(whole.ridge.loo_scores[place], without, atol=1e-6)


def test_the_least_likely_label_comes_first_and_single_images_are_not_doubted() -> None:
    embeddings, labels = clouds()
    labels[4], labels[7], labels[9] = "c0", "c2", "alone"
    found = find_label_issues(embeddings, labels)
    assert {4, 7} <= {d.row for d in found[:3]} and 9 not in {d.row for d in found}
    assert [d.given_label_prob for d in found] == sorted(d.given_label_prob for d in found)


def test_images_in_a_wrong_folder_are_found_also_where_the_model_alone_knows_the_right_class(
    known: Learner, tmp_path
) -> None:
    folder = photos(tmp_path / "spring", ["ant", "bee"], 12)
    cat = photos(tmp_path / "other", ["cat"], 3, seed=7) / "cat" / "01.png"
    moved = folder / "ant" / "moved.png"
    moved.write_bytes(cat.read_bytes())
    swapped = folder / "bee" / "swapped.png"
    (folder / "ant" / "03.png").rename(swapped)
    found = mislabelled(known, read_folder(folder), 2)
    assert {(one.path, one.guess, one.other) for one in found.chosen} == {
        (moved, "cat", "ant"),
        (swapped, "ant", "bee"),
    }
    assert found.images == 25 and found.found["mislabelled"] >= 2


def test_one_class_alone_cannot_be_doubted(tmp_path) -> None:
    folder = photos(tmp_path / "spring", ["ant"], 3)
    with expect_error("one-class", DataError, name="ant"):
        mislabelled(taught(folder, settings=INSTANT), read_folder(folder))
