"""Settings under which methods learn toys within a second."""

from __future__ import annotations

from typing import Any

TRAINED = {"epochs": 2, "batch_size": 8, "neck_hidden": 16, "augmentation": "crop", "centroids": 2}
QUICK = {"epochs": 6, "batch_size": 8, "learning_rate": 5e-3, "augmentation": "crop"}
# A method that is not named here passes with its defaults.
CHEAP: dict[str, dict[str, Any]] = {
    "protosteer": TRAINED,
    "cpp": TRAINED,
    "ranpac": {"features": 50},
    "finetune": {"epochs": 12, "batch_size": 8, "learning_rate": 3e-3, "augmentation": "crop"},
    "joint": QUICK,
    "ewc": {**QUICK, "fisher_images": 4},
    "lwf": QUICK,
    "bic": {**QUICK, "buffer_size": 24},
    "co2l": {**QUICK, "epochs": 4, "buffer_size": 24},
}
