"""Sequential fine-tuning, the lower bound: train the whole backbone and a linear head task after task.

Cross-entropy runs over all classes so far, but only the current task's images are available, so earlier knowledge is
overwritten.
"""

from __future__ import annotations

from protosteer.methods.base import Source, register_method
from protosteer.methods.finetune_base import Network
from protosteer.methods.training_utils import TrainingSettings


@register_method("finetune")
class Finetune(Network):
    """`Network` as it stands."""

    source = Source("McCloskey and Cohen", "Catastrophic interference in connectionist networks", "PLM", 1989)
    settings_class = TrainingSettings
    supports_repeated_classes = True
    test_settings = {**Network.test_settings, "epochs": 12, "learning_rate": 3e-3}
