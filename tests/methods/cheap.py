"""Settings under which methods learn toys within a second."""

from __future__ import annotations

from typing import Any

TRAINED = {"epochs": 2, "batch_size": 8, "neck_hidden": 16, "augmentation": "crop", "centroids": 2}
NETWORK = {"epochs": 12, "batch_size": 8, "learning_rate": 3e-3, "augmentation": "crop"}
PROMPTED = {"batch_size": 8, "learning_rate": 0.02, "gradient_clip": 5.0, "augmentation": "crop"}
QUICK = {"epochs": 6, "batch_size": 8, "learning_rate": 5e-3, "augmentation": "crop"}
# A method that is not named here passes with its defaults.
CHEAP: dict[str, dict[str, Any]] = {
    "protosteer": TRAINED,
    "cpp": TRAINED,
    "ranpac": {"features": 50},
    "finetune": NETWORK,
    "er": {**NETWORK, "epochs": 6, "buffer_size": 20},
    "der++": {**NETWORK, "epochs": 6, "buffer_size": 20},
    "icarl": {**NETWORK, "epochs": 6, "buffer_size": 20},
    "gdumb": {**NETWORK, "buffer_size": 20},
    "slca": {**QUICK, "epochs": 5, "learning_rate": 0.1, "align_epochs": 3, "align_draws": 32},
    "pass": {**QUICK, "learning_rate": 1e-2, "distill_weight": 0.1, "prototype_weight": 1.0},
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
    "l2p": {**PROMPTED, "epochs": 15, "pool_size": 4, "prompt_length": 2, "selected": 2, "pull": 0.1},
    "dualprompt": {**PROMPTED, "epochs": 8, "expert_length": 4},
    "coda-prompt": {**PROMPTED, "epochs": 8, "components": 3, "orthogonality": 0.1, "augmentation": "none"},
    "joint": QUICK,
    "ewc": {**QUICK, "fisher_images": 4},
    "lwf": QUICK,
    "bic": {**QUICK, "buffer_size": 24},
    "co2l": {**QUICK, "epochs": 4, "buffer_size": 24},
}
