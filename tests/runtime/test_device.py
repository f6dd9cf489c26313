"""Names of devices."""

import pytest
import torch

from expect import expect_error
from protosteer.errors import SettingsError
from protosteer.runtime.device import choose_device


def test_auto_is_a_device_that_can_be_used() -> None:
    assert torch.zeros(1, device=choose_device("auto")).item() == 0 and choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "meta:x", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_cannot_be_used_is_rejected(name: str) -> None:
    with expect_error("no-such-device", SettingsError, device=name):
        choose_device(name)
