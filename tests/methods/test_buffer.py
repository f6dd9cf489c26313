"""What a buffer keeps, and by which rule."""

import torch

from protosteer.data.images import ArrayImages
from protosteer.methods.buffer import Buffer, balanced_rows


def grey(*values: int) -> ArrayImages:
    return ArrayImages(torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2))


def shown(buffer: Buffer) -> list[int]:
    return buffer.pixels[:, 0, 0, 0].tolist()


def test_rows_number_what_is_kept_and_then_what_is_new():
    buffer = Buffer()
    buffer.offer(grey(1, 2, 3), torch.tensor([0, 0, 1]), torch.tensor([0, 2]), logits=torch.eye(3))
    assert shown(buffer) == [1, 3] and buffer.labels.tolist() == [0, 1] and buffer.offered == 3
    buffer.offer(grey(4, 5), torch.tensor([2, 3]), torch.tensor([3, 0, 2]), logits=torch.eye(3)[:2] * 7)
    assert shown(buffer) == [5, 1, 4] and buffer.labels.tolist() == [3, 0, 2] and buffer.offered == 5
    assert buffer.notes["logits"].tolist() == [[0, 7, 0], [1, 0, 0], [7, 0, 0]]


def test_a_buffer_can_be_put_back():
    buffer, other = Buffer(), Buffer()
    buffer.offer(grey(1, 2), torch.tensor([0, 1]), torch.arange(2), logits=torch.eye(2))
    other.load_state_dict(buffer.state_dict())
    assert shown(other) == [1, 2] and other.offered == 2 and torch.equal(other.notes["logits"], torch.eye(2))
    assert len(other.images) == 2 and sorted(other.draw(5).tolist()) == [0, 1]


def test_what_is_kept_comes_before_what_is_new():
    buffer = Buffer()
    images, labels = buffer.joined_with(grey(1, 2), torch.tensor([0, 1]))
    assert len(images) == 2 and labels.tolist() == [0, 1]
    buffer.offer(grey(1, 2), torch.tensor([0, 1]), torch.arange(2))
    images, labels = buffer.joined_with(grey(3), torch.tensor([2]))
    assert images.pixels([2, 0, 1])[:, 0, 0, 0].tolist() == [3, 1, 2] and labels.tolist() == [0, 1, 2]


def test_room_is_shared_out_among_classes_and_old_images_stay():
    buffer = Buffer()
    torch.manual_seed(0)
    buffer.offer_balanced(grey(*range(10)), torch.tensor([0, 1] * 5), size=6)
    first = set(shown(buffer))
    assert buffer.labels.bincount().tolist() == [3, 3] and first != {0, 1, 2, 3, 4, 5}
    buffer.offer_balanced(grey(*range(10, 20)), torch.full((10,), 2), size=6)
    assert buffer.labels.bincount().tolist() == [2, 2, 2] and buffer.offered == 20
    assert {value for value in shown(buffer) if value < 10} < first


def test_balanced_classes_differ_by_one_at_most_and_keep_their_first():
    labels = torch.tensor([0] * 9 + [1] * 2 + [2] * 9)
    rows = balanced_rows(labels, 10)
    assert labels[rows].bincount().tolist() == [4, 2, 4] and rows.tolist() == [0, 1, 2, 3, 9, 10, 11, 12, 13, 14]
    assert balanced_rows(labels, 99).tolist() == list(range(20))
