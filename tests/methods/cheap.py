"""Settings under which methods learn toys within a second."""

from __future__ import annotations

from typing import Any

TRAINED = {"epochs": 2, "batch_size": 8, "neck_hidden": 16, "augmentation": "crop", "centroids": 2}
# A method that is not named here passes with its defaults.
CHEAP: dict[str, dict[str, Any]] = {
    "protosteer": TRAINED,
    "cpp": TRAINED,
    "ranpac": {"features": 50},
    "slca": {
        "epochs": 5,
        "batch_size": 8,
        "learning_rate": 0.1,
        "augmentation": "crop",
        "align_epochs": 3,
        "align_draws": 32,
    },
    "pass": {
        "epochs": 6,
        "batch_size": 8,
        "learning_rate": 1e-2,
        "augmentation": "crop",
        "distill_weight": 0.1,
        "prototype_weight": 1.0,
    },
    "finetune": {"epochs": 12, "batch_size": 8, "learning_rate": 3e-3, "augmentation": "crop"},
}
