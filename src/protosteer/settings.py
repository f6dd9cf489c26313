"""All settings of the method, each default stated once. The defaults are the paper's."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from protosteer.errors import SettingsError
from protosteer.util.reading import read_regular
from protosteer.util.text import suggestion

if sys.version_info >= (3, 11):
    from typing import Self

    import tomllib
else:
    import tomli as tomllib
    from typing_extensions import Self

AUGMENTATIONS = ("paper", "no-flip", "crop", "none")
CLUSTERINGS = ("spectral", "kmeans")
LABEL_ASSIGNMENTS = ("discretize", "kmeans")
PRESETS = ("best", "fast", "instant", "paper")

# Settings that older files name, with the value at which they did nothing.
RETIRED = {"cached_views": 0}


@dataclass(frozen=True)
class Values:
    """Settings of any method: a frozen dataclass of bool, int, float and str, checked when it is made."""

    CHOICES: ClassVar[Mapping[str, Sequence[str]]] = {}
    AT_LEAST: ClassVar[Mapping[str, float]] = {}
    # Of all methods: what sizes memory or a loop is far below this, and what lies above it is a slip.
    AT_MOST: ClassVar[Mapping[str, int]] = {
        "prompt_length": 4096,
        "general_length": 4096,
        "expert_length": 4096,
        "prompt_from_layer": 1000,
        "prototypes_per_step": 2**20,
        "neck_layers": 64,
        "neck_hidden": 2**16,
        "epochs": 100_000,
        "warmup_epochs": 100_000,
        "batch_size": 2**16,
        "embed_batch_size": 2**16,
        "centroids": 10_000,
        "neighbours": 10_000,
        "features": 100_000,
        "buffer_size": 100_000,
        "pool_size": 10_000,
        "components": 10_000,
        "align_epochs": 100_000,
        "align_draws": 2**16,
        "adapter_width": 2**16,
    }
    ABOVE_ZERO: ClassVar[Sequence[str]] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _typed(field, getattr(self, field.name)))
        for name, choices in self.CHOICES.items():
            if getattr(self, name) not in choices:
                raise SettingsError(f"{name} = {getattr(self, name)!r}: choose one of {', '.join(choices)}")
        for name, least in self.AT_LEAST.items():
            if getattr(self, name) < least:
                raise SettingsError(f"{name} = {getattr(self, name)}: must be at least {least:g}")
        for name, most in self.AT_MOST.items():
            if getattr(self, name, most) > most:
                raise SettingsError(f"{name} = {getattr(self, name)}: must be at most {most}")
        for name in self.ABOVE_ZERO:
            if getattr(self, name) <= 0:
                raise SettingsError(f"{name} = {getattr(self, name)}: must be greater than 0")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise SettingsError(unknown_setting(key, known))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> Self:
        return self.from_dict({**self.to_dict(), **changes})


@dataclass(frozen=True)
class Settings(Values):
    """How a learner learns and predicts. Frozen: a learner's settings never change under its feet."""

    # Prompt: L_p, its kind, and where a new task's prompt starts.
    prompts: bool = True  # False: the training-free baseline, Sec. 3.2
    prompt_tasks: str = "all"  # that get one; "first": only the one that serves all classes
    prompt_length: int = 1
    prompt_kind: str = "deep"
    prompt_from_layer: int = 1  # later: the layers before are one trunk for all prompts (not in the paper)
    prompt_start: str = "previous"

    # Contrastive prototypical loss, Eq. 6.
    loss: str = "cpl"
    temperature: float = 0.6
    uniformity: bool = False  # True: positives return to the denominator (ablation)
    prototypes_per_step: int = -1  # -1: as many as the batch has images; 0: none (ablation)
    noise: str = "cluster"  # m: deviation of the centroid's cluster | mean variance of the class | 0
    anchor_rows: str = "images"

    # Neck m_sigma; one layer is the linear neck of the ablation.
    neck_layers: int = 3
    neck_hidden: int = 2048

    # Optimisation of one task.
    epochs: int = 50
    batch_size: int = 256
    learning_rate: float = 1e-3
    final_learning_rate: float = 1e-6
    warmup_epochs: int = 5  # the shorter of the two warm-ups counts
    warmup_fraction: float = 0.1
    weight_decay: float = 5e-4
    final_weight_decay: float = 1e-2
    gradient_clip: float = 5.0
    augmentation: str = "paper"

    # Prototypes: C per class.
    centroids: int = 5
    clustering: str = "spectral"
    assign_labels: str = "discretize"

    # Inference: the paper's rule with its r nearest key centroids, or evidence (docs/beyond.md).
    rule: str = "paper"
    neighbours: int = 3
    embed_batch_size: int = 64

    # Every task a function of its own images alone: exact forgetting and merging.
    independent: bool = False
    seed: int = 0

    CHOICES: ClassVar = {
        "rule": ("paper", "evidence"),
        "prompt_tasks": ("all", "first"),
        "prompt_kind": ("deep", "shallow"),
        "prompt_start": ("previous", "zero", "random"),
        "loss": ("cpl", "supcon", "cross-entropy"),
        "noise": ("cluster", "class", "none"),
        "anchor_rows": ("images", "images+prototypes"),
        "clustering": CLUSTERINGS,
        "assign_labels": LABEL_ASSIGNMENTS,
        "augmentation": AUGMENTATIONS,
    }
    AT_LEAST: ClassVar = {
        "prompt_length": 1,
        "prompt_from_layer": 1,
        "epochs": 1,
        "batch_size": 2,
        "learning_rate": 0.0,
        "final_learning_rate": 0.0,
        "warmup_epochs": 0,
        "warmup_fraction": 0.0,
        "weight_decay": 0.0,
        "final_weight_decay": 0.0,
        "neck_layers": 1,
        "neck_hidden": 1,
        "centroids": 1,
        "neighbours": 1,
        "embed_batch_size": 1,
        "seed": 0,
    }
    ABOVE_ZERO: ClassVar = ("temperature", "gradient_clip")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_kind == "shallow" and self.prompt_from_layer > 1:
            raise SettingsError(
                f"prompt_from_layer = {self.prompt_from_layer}: a shallow prompt begins in layer 1; use "
                "prompt_kind = 'deep'"
            )
        if self.prototypes_per_step < -1:
            raise SettingsError(
                f"prototypes_per_step = {self.prototypes_per_step}: give a count, 0 for none, or -1 for "
                "as many as the batch has images"
            )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Settings:
        """Settings by the name of a preset; what is given besides wins."""
        return cls.from_dict({**preset(name), **changes})

    def under(self, name: str) -> Settings:
        """The same settings, but those that presets are about as this preset has them."""
        wanted, about = Settings.preset(name), {key for changes in _CHANGES.values() for key in changes}
        return self.replace(**{key: getattr(wanted, key) for key in about})

    @classmethod
    def from_file(cls, values: Mapping[str, Any]) -> Settings:
        """From a file of any version: names that have been retired since are left out."""
        return cls.from_dict({name: value for name, value in values.items() if name not in RETIRED})

    @classmethod
    def from_toml(cls, path: str | Path) -> Settings:
        """Read settings from a TOML file of `name = value` lines; absent names keep their defaults."""
        try:
            values = read_toml(Path(path)).items()
            return cls.from_dict({n: v for n, v in values if n not in RETIRED or v != RETIRED[n]})
        except SettingsError as error:
            raise SettingsError(f"{path}: {error}") from error

    def to_toml(self, path: str | Path) -> None:
        lines = [f"{name} = {json.dumps(value)}" for name, value in self.to_dict().items()]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file of `name = value` lines."""
    try:
        values = tomllib.loads(read_regular(path).decode("utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # tomllib's and the decoder's are both of the first kind
        raise SettingsError(f"{path} is not valid TOML: {error}") from error
    table = next((name for name, value in values.items() if isinstance(value, dict)), None)
    if table is not None:
        raise SettingsError(f"{path}: [{table}] is a table; give a plain list of name = value")
    return values


# "best" trains a prompt per task, "fast" one for all classes, "instant" nothing; all three read what they keep
# as evidence.
_QUICKER = {"epochs": 15, "batch_size": 50}
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "best": {"rule": "evidence", **_QUICKER},
    "fast": {"rule": "evidence", **_QUICKER, "prompt_tasks": "first"},
    "instant": {"rule": "evidence", "prompts": False},
    "paper": {},
}


def preset(name: str) -> dict[str, Any]:
    """What a preset changes in the paper's settings."""
    if name not in PRESETS:
        raise SettingsError(f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}")
    return dict(_CHANGES[name])


def unknown_setting(key: str, known: Sequence[str]) -> str:
    return f"unknown setting '{key}'; {suggestion(key, known)}"


def _typed(field: dataclasses.Field[Any], value: Any) -> Any:
    """The value in the field's own type: an int may stand for a float, nothing else is converted."""
    wanted = {"bool": bool, "int": int, "float": float, "str": str}[str(field.type)]
    if type(value) is int and abs(value) >= 2**63:  # Python may refuse even to write it
        raise SettingsError(f"{field.name}: the number is too large")
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        shown = f" = {value!r}" if isinstance(value, (bool, int, float, str)) else ""
        raise SettingsError(
            f"{field.name}{shown[:80]}: must be {wanted.__name__}, not {type(value).__name__}"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise SettingsError(f"{field.name} = {value}: must be a finite number")
    return value
