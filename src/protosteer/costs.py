"""What the stages of learning cost, so that their end can be foreseen. The unit is a plain forward pass."""

from __future__ import annotations

from protosteer.settings import Settings

# Per image: of augmenting it, and of training all layers on it.
_AUGMENTING, _TRAINING = 1.0, 3.0


def stage_costs(settings: Settings, depth: int, images: int) -> dict[str, float]:
    """Of every stage that `Learner.learn` reports for so many images, in order; `depth` is the backbone's."""
    if not settings.prompts:
        return {"keys": images}
    trunk = (settings.prompt_from_layer - 1) / depth
    seen = settings.epochs * max(1, images // settings.batch_size) * min(settings.batch_size, images)
    training = seen * (_AUGMENTING + trunk + _TRAINING * (1 - trunk))
    return {"keys": images, "training": training, "values": images}
