"""Settings under which methods learn toys within a second."""

from __future__ import annotations

from typing import Any

TRAINED = {"epochs": 2, "batch_size": 8, "neck_hidden": 16, "augmentation": "crop", "centroids": 2}
# A method that is not named here passes with its defaults.
CHEAP: dict[str, dict[str, Any]] = {
    "protosteer": TRAINED,
    "cpp": TRAINED,
    "ranpac": {"features": 50},
    "aper": {"epochs": 2, "batch_size": 8, "prompt_length": 2, "augmentation": "crop"},
    "ease": {
        "epochs": 2,
        "batch_size": 8,
        "adapter_width": 4,
        "adapter_scale": 1.0,
        "augmentation": "crop",
        "learning_rate": 0.3,
    },
    "s-prompts": {
        "epochs": 8,
        "batch_size": 8,
        "prompt_length": 2,
        "learning_rate": 0.06,
        "augmentation": "crop",
    },
    # Tasks of so few images are told apart only where energies come close to their anchor.
    "esn": {
        "epochs": 20,
        "batch_size": 8,
        "prompt_length": 2,
        "learning_rate": 0.05,
        "gradient_clip": 1.0,
        "augmentation": "none",
    },
    "finetune": {"epochs": 12, "batch_size": 8, "learning_rate": 3e-3, "augmentation": "crop"},
}
