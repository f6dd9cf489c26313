"""Sequential fine-tuning, the lower bound: the whole backbone and a linear head are trained task after task.

Cross-entropy runs over all classes so far, but only this task's images are there: what was learned is
overwritten.
"""

from __future__ import annotations

from protosteer.methods.base import Source
from protosteer.methods.finetune_base import Network
from protosteer.methods.training_utils import Training


class Finetune(Network):
    name = "finetune"
    source = Source("McCloskey and Cohen", "Catastrophic interference in connectionist networks", "PLM", 1989)
    settings_class = Training
    again = True
