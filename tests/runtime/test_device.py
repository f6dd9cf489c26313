"""Names of devices."""

from __future__ import annotations

import pytest
import torch

from protosteer.errors import SettingsError
from protosteer.runtime.device import choose_device


def test_auto_is_a_device_that_can_be_used() -> None:
    assert torch.zeros(1, device=choose_device("auto")).item() == 0
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "meta:x", *([] if torch.cuda.is_available() else ["cuda"])])
def test_a_device_that_cannot_be_used_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(SettingsError, match=f"device '{name}' cannot be used here; try cpu, cuda") as caught:
        choose_device(name)
    assert "\n" not in str(caught.value)
