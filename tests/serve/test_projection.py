import math

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes

from expect import expect_error

pytest.importorskip("fastapi", reason="the extra 'serve' is not installed")

from conftest import easy_task, tiny_backbone
from protosteer.errors import LearnerError
from protosteer.learner import Learner
from protosteer.model.class_table import ClassTable
from protosteer.model.memory import Memory
from protosteer.model.records import ClassRecord, TaskRecord
from protosteer.paper.prototypes import Centroids
from protosteer.rules import RULES, EvidenceRule, reader_of
from protosteer.serve.projection import EDGE, Projection
from protosteer.settings import Settings


def record(name: str, *means: list[float], counts: list[int] | None = None) -> ClassRecord:
    values = torch.tensor(means)
    weights = torch.tensor(counts or [1] * len(means))
    return ClassRecord(name, values, Centroids(values, torch.zeros_like(values), weights))


def memory(*records: ClassRecord) -> Memory:
    return Memory([TaskRecord(f"task of {r.name}", ClassTable.of([r]), None) for r in records])


def fitted(memory: Memory) -> Projection:
    return Projection.fit(memory, reader_of(memory, Settings()))


def spots(projection: Projection) -> dict[str, tuple[float, float]]:
    return {name: (x, y) for name, _, x, y in projection.classes}


def test_three_classes_lie_as_their_directions_do():
    # An isosceles triangle on the unit sphere: A and B differ most, along x; C lies off their middle.
    angle = 0.5
    a, b = [math.cos(1.0), math.sin(1.0), 0.0], [math.cos(1.0), -math.sin(1.0), 0.0]
    c = [math.cos(1.0) * math.cos(angle), 0.0, math.sin(angle)]
    found = spots(fitted(memory(record("A", a), record("B", b), record("C", c))))
    assert found["A"] == pytest.approx((1.0, found["B"][1])) and found["B"][0] == pytest.approx(-1.0)
    assert found["C"][0] == pytest.approx(0.0, abs=1e-6)
    # one scale for both axes: distances keep their proportions
    unit = torch.nn.functional.normalize(torch.tensor([a, b, c]), dim=1)
    expected = (unit[0] - unit[2]).norm() / (unit[0] - unit[1]).norm()
    assert math.dist(found["A"], found["C"]) / math.dist(found["A"], found["B"]) == pytest.approx(
        float(expected), rel=1e-5
    )


def test_a_new_map_is_turned_to_the_one_before():
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(9, 5, generator=draw).tolist()
    records = [record(name, row) for name, row in zip("ABCDEFGHI", rows, strict=True)]
    old, plain = fitted(memory(*records[:6])), fitted(memory(*records[1:]))
    new = Projection.fit(memory(*records[1:]), reader_of(memory(*records[1:]), Settings()), old)
    common = "BCDEF"
    before, untouched, after = (np.array([spots(one)[name] for name in common]) for one in (old, plain, new))
    turn, _ = orthogonal_procrustes(untouched, before)  # the oracle; the scale is settled afterwards
    expected = np.array([spots(plain)[name] for name in "BCDEFGHI"]) @ turn
    expected /= np.abs(expected).max()
    assert np.allclose([spots(new)[name] for name in "BCDEFGHI"], expected, atol=1e-6)
    assert np.linalg.norm(after - before) < np.linalg.norm(untouched - before)
    assert new.place(torch.tensor(rows))[1] == pytest.approx(spots(new)["B"], abs=1e-6)  # pictures are turned with it


def test_lengths_of_centroids_do_not_count_but_their_images_do():
    rows = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.2], [0.0, 0.0, 1.0]]
    once = fitted(memory(*(record(name, row) for name, row in zip("ABC", rows, strict=True))))
    longer = [[size * x for x in row] for size, row in zip((9.0, 0.1, 5.0), rows, strict=True)]
    scaled = fitted(memory(*(record(name, row) for name, row in zip("ABC", longer, strict=True))))
    for name, spot in spots(once).items():
        assert spots(scaled)[name] == pytest.approx(spot, abs=1e-6)
    many = record("A", [3.0, 0, 0], [0, 0, 1.0], counts=[99, 1])
    few = record("A", [3.0, 0, 0], [0, 0, 1.0], counts=[1, 1])
    others = record("B", [0, 1.0, 0]), record("C", [0, 0, 1.0])
    near, far = spots(fitted(memory(few, *others))), spots(fitted(memory(many, *others)))
    assert math.dist(near["A"], near["C"]) < math.dist(far["A"], far["C"])


def test_one_class_is_in_the_middle_and_unlike_pictures_move_off():
    projection = fitted(memory(record("A", [0.0, 2.0])))
    assert projection.classes == [("A", "task of A", 0.0, 0.0)]
    (same, across, opposite) = projection.place(torch.tensor([[0.0, 7.0], [1.0, 0.0], [0.0, -1.0]]))
    assert same == (0.0, 0.0) and across == pytest.approx((-1.0, 0.0)) and opposite == (-EDGE, 0.0)


def test_two_classes_face_each_other_and_the_second_axis_is_likeness_to_both():
    projection = fitted(memory(record("A", [1.0, 0, 0]), record("B", [0, 1.0, 0])))
    assert spots(projection) == {"A": pytest.approx((1.0, 0.0), abs=1e-9), "B": pytest.approx((-1.0, 0.0), abs=1e-9)}
    (between, stranger) = projection.place(torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
    assert between[0] == pytest.approx(0.0, abs=1e-9) and stranger[0] == pytest.approx(0.0, abs=1e-9)
    assert between[1] > 0 > stranger[1]


def test_opposite_classes_have_no_second_axis_and_equal_ones_none():
    projection = fitted(memory(record("A", [1.0, 0.0]), record("B", [-1.0, 0.0])))
    assert spots(projection) == {"A": (1.0, 0.0), "B": (-1.0, 0.0)}
    assert projection.place(torch.tensor([[0.0, 1.0]])) == [(0.0, 0.0)]
    projection = fitted(memory(*(record(name, [1.0, 2.0, 3.0]) for name in "ABC")))
    assert list(spots(projection).values()) == [pytest.approx((0.0, 0.0), abs=1e-6)] * 3


def test_a_class_mean_is_placed_on_its_own_dot_and_names_keep_their_tasks():
    numbers = torch.randn(12, 5, 16, generator=torch.Generator().manual_seed(0)).tolist()
    records = [record(f"class {i}", *means, counts=[1, 2, 3, 4, 5]) for i, means in enumerate(numbers)]
    tasks = [
        TaskRecord("first", ClassTable.of(records[:7]), None),
        TaskRecord("second", ClassTable.of(records[7:]), None),
    ]
    projection = fitted(Memory(tasks))
    assert [(name, task) for name, task, _, _ in projection.classes] == [
        (f"class {i}", "first" if i < 7 else "second") for i in range(12)
    ]
    weights = torch.tensor([1.0, 2, 3, 4, 5])[:, None]
    means = [(torch.nn.functional.normalize(r.values.means, dim=1) * weights).sum(dim=0) for r in records]
    for (x, y), (_, _, class_x, class_y) in zip(projection.place(torch.stack(means)), projection.classes, strict=True):
        assert (x, y) == pytest.approx((class_x, class_y), abs=1e-5)


def test_axes_do_not_depend_on_the_order_of_classes_or_on_which_side_was_factored():
    numbers = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    numbers[:, 0] *= 3  # so that the two leading axes are far from equal
    numbers[:, 1] *= 2
    wide = torch.cat([numbers, torch.zeros(30, 40)], dim=1)  # same points, more dimensions than classes
    records = [record(str(i), row) for i, row in enumerate(numbers.tolist())]
    straight, backwards = fitted(memory(*records)), fitted(memory(*records[::-1]))
    padded = fitted(memory(*(record(str(i), row) for i, row in enumerate(wide.tolist()))))
    for name, spot in spots(straight).items():
        assert spots(backwards)[name] == pytest.approx(spot, abs=1e-6)
        assert spots(padded)[name] == pytest.approx(spot, abs=1e-6)


@pytest.mark.parametrize("first", ["plain", "domain"])
def test_by_evidence_pictures_lie_where_their_classes_do_in_the_first_view(first, monkeypatch):
    monkeypatch.setitem(RULES, "evidence", EvidenceRule(min_pass_weight=0.0))  # so that both views are there
    learner = Learner(
        tiny_backbone(), Settings.preset("best", epochs=1, neck_hidden=16, augmentation="none", feature_layers="last")
    )
    for names in (["cat", "dog"], ["ant", "bee"]):  # not in the order of their names
        learner.learn(easy_task(names))
    learner.reader.classifier.passes.sort(key=lambda view: (view.prompt is None) == (first == "domain"))
    view = learner.reader.classifier.passes[0]
    assert (view.prompt is None) == (first == "plain") and len(learner.reader.classifier.passes) == 2
    projection = Projection.fit(learner.memory, learner.reader)
    sketches = [record.plain if first == "plain" else record.shared for record in learner.memory.records]
    means = torch.stack([(sketch.points * sketch.counts[:, None]).sum(dim=0) for sketch in sketches])
    for spot, (_, _, x, y) in zip(projection.place(means), projection.classes, strict=True):
        assert spot == pytest.approx((x, y), abs=1e-5)
    images, labels = easy_task(["ant", "bee"])
    seen = learner.predict(images).embeddings
    of_ant = torch.tensor([label == "ant" for label in labels])
    centre = torch.nn.functional.normalize(seen[of_ant], dim=1).mean(dim=0, keepdim=True)
    assert projection.place(centre)[0] == pytest.approx(spots(projection)["ant"], abs=1e-2)


def test_an_empty_model_has_no_map():
    with expect_error("nothing-learned", LearnerError):
        fitted(Memory())
