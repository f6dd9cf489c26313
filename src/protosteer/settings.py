"""Every setting of the learner, with its default and bounds. docs/explanation/cpp.md says what each preset is."""

from __future__ import annotations

import dataclasses
import json
import operator
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protosteer.errors import SettingsError
from protosteer.util.files import read_regular
from protosteer.util.text import suggestion

if sys.version_info >= (3, 11):
    from typing import Self

    import tomllib
else:
    import tomli as tomllib
    from typing_extensions import Self

AUGMENTATIONS = ("paper", "no-flip", "crop", "none")
LOSSES = ["cpl", "supcon", "cross-entropy"]  # `paper.losses.register_loss` adds to them
CLUSTERINGS = ("spectral", "kmeans")
LABEL_ASSIGNMENTS = ("discretize", "kmeans")
PAPER_PRESETS = ("paper", "paper-text", "authors")
PRESETS = ("best", "fast", "instant", *PAPER_PRESETS)
DEFAULT_PRESET = "fast"

MAX_FLOAT = 1e30  # of a setting: optimisers divide it, and what comes out must be a float32
# Settings that only older files name, with the value at which they had no effect.
RETIRED = {"cached_views": 0}


def setting(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: Sequence[str] | None = None,
) -> Any:
    """Declare a field of `Values` with its bounds.

    A subclass that only changes the default keeps the bounds of the class it inherits from.

    Args:
        default: The default value.
        at_least: The smallest value allowed.
        above: A value that must be exceeded.
        at_most: The largest value allowed. Sizes of memory and loops have one, so that a typing error is found early.
        choices: All values allowed, of a string.

    Returns:
        A dataclass field whose metadata holds the bounds.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "choices": choices}
    metadata = {name: bound for name, bound in bounds.items() if bound is not None}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Values:
    """Settings of a method: a frozen dataclass of bool, int, float and str, validated when it is created."""

    def __post_init__(self) -> None:
        bounds = self.bounds()
        for field in dataclasses.fields(self):
            value = _convert(field, getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            _check_bounds(field.name, value, bounds[field.name])

    @classmethod
    def bounds(cls) -> dict[str, Mapping[str, Any]]:
        """Return the bounds of each setting by name, as `setting` takes them."""
        bounds: dict[str, dict[str, Any]] = {field.name: {} for field in dataclasses.fields(cls)}
        for base in reversed(cls.__mro__):
            for name, field in vars(base).get("__dataclass_fields__", {}).items():
                bounds[name] |= field.metadata
        return dict(bounds)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create settings from names and values; an unknown name is an error."""
        names = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in names:
                raise SettingsError(unknown_setting(key, names), code="unknown-setting", name=key)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return all settings by name."""
        return dataclasses.asdict(self)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some settings changed."""
        return self.from_dict({**self.to_dict(), **changes})

    @property
    def reproduces_paper(self) -> bool:
        """Return True if `auto` precision must be fp32, because a published result is to be repeated."""
        return False


@dataclass(frozen=True)
class Settings(Values):
    """How a learner learns and predicts; `Settings()` is the preset "fast".

    Only `neighbours` is used by CPP inference (`rule="paper"`) alone. `Settings.preset("paper")` has the paper's settings.

    Attributes:
        prompts: Train prompts; False stores prototypes alone and trains nothing.
        prompt_tasks: Tasks that get a prompt: the `first`, whose prompt then serves all classes, or `all`.
        prompt_length: Tokens of a prompt in each layer.
        prompt_kind: `deep`: tokens for every layer; `shallow`: tokens that enter before layer 1.
        prompt_from_layer: First layer with prompts; a later one takes less time.
        prompt_start: Where a new prompt starts: at the `previous` task's, at `zero-then-previous`, `zero` or `random`.
        loss: Loss of prompt training; `cpl` is the paper's contrastive prototypical loss.
        temperature: Temperature of the loss; under CPP inference also of probabilities and energy.
        uniformity: Keep positives in the denominator of the loss.
        prototypes_per_step: Earlier prototypes in a step; -1: as many as the batch has images; 0: none.
        noise: Noise on these prototypes: deviation of the `cluster`, variance of the `class`, or `none`.
        anchor_rows: Rows of the loss: `images` or `images+prototypes`.
        neck_layers: Layers of the projection behind the embedding, used in training only.
        neck_hidden: Width of that projection.
        epochs: Epochs of one task.
        batch_size: Images of a training step.
        learning_rate: Learning rate after the warm-up.
        final_learning_rate: Learning rate at the end.
        warmup_epochs: Warm-up in epochs; the shorter of this and `warmup_fraction` counts.
        warmup_fraction: Warm-up as a fraction of all steps.
        weight_decay: Weight decay at the start.
        final_weight_decay: Weight decay at the end.
        gradient_clip: Largest norm of a step's gradient.
        augmentation: Training augmentation; `no-flip` is for digits and letters, `none` for the evaluation preprocessing.
        centroids: Prototypes per class, at most, of keys and of values each; CPP and task-specific prompts.
        clustering: How prototypes of a class are found: `spectral` clustering or `kmeans`.
        assign_labels: Last step of spectral clustering.
        rule: How classes are stored and predicted: `evidence` is the default classifier, `paper` CPP inference.
        feature_layers: Layers that the default classifier reads: `several` of the same forward pass, or the `last`.
        neighbours: CPP inference: nearest key prototypes that name the candidate prompts.
        embed_batch_size: Images that are embedded at once, at most.
        independent: Learn every task from its own images alone, so that forgetting and merging are exact.
        seed: Seed of everything random.
    """

    # Prompt: L_p, its kind, and where a new task's prompt starts.
    prompts: bool = True  # False: the training-free baseline, Sec. 3.2
    # Which tasks get a prompt; "first": only the one that serves all classes.
    prompt_tasks: str = setting("first", choices=("all", "first"))
    prompt_length: int = setting(1, at_least=1, at_most=4096)
    prompt_kind: str = setting("deep", choices=("deep", "shallow"))
    # From a later layer on: all prompts share the layers before it (not in the paper).
    prompt_from_layer: int = setting(1, at_least=1, at_most=1000)
    # "previous": the first one at zero, or at small random numbers if it has several tokens, which would stay equal.
    prompt_start: str = setting("previous", choices=("previous", "zero-then-previous", "zero", "random"))

    # Contrastive prototypical loss, Eq. 6.
    loss: str = setting("cpl", choices=LOSSES)
    temperature: float = setting(0.6, above=0)
    uniformity: bool = False  # True: positives return to the denominator (ablation)
    # -1: as many as the batch has images; 0: none (ablation).
    prototypes_per_step: int = setting(-1, at_most=2**20)
    # m: deviation of the centroid's cluster, mean variance of the class, or 0.
    noise: str = setting("cluster", choices=("cluster", "class", "none"))
    anchor_rows: str = setting("images", choices=("images", "images+prototypes"))

    # Neck m_sigma; one layer is the linear neck of the ablation.
    neck_layers: int = setting(3, at_least=1, at_most=64)
    neck_hidden: int = setting(2048, at_least=1, at_most=2**16)

    # Optimisation of one task.
    epochs: int = setting(15, at_least=1, at_most=100_000)
    batch_size: int = setting(50, at_least=2, at_most=2**16)
    learning_rate: float = setting(1e-3, at_least=0)
    final_learning_rate: float = setting(1e-6, at_least=0)
    warmup_epochs: int = setting(5, at_least=0, at_most=100_000)  # the shorter of the two warm-ups counts
    warmup_fraction: float = setting(0.1, at_least=0)
    weight_decay: float = setting(5e-4, at_least=0)
    final_weight_decay: float = setting(1e-2, at_least=0)
    gradient_clip: float = setting(5.0, above=0)
    augmentation: str = setting("paper", choices=AUGMENTATIONS)

    # Prototypes: C per class.
    centroids: int = setting(5, at_least=1, at_most=10_000)
    clustering: str = setting("spectral", choices=CLUSTERINGS)
    assign_labels: str = setting("discretize", choices=LABEL_ASSIGNMENTS)

    # Inference: the default classifier (docs/explanation/default-classifier.md), or CPP inference with its r nearest key centroids.
    rule: str = setting("evidence", choices=("paper", "evidence"))
    # Layers that the default classifier reads: the last one, or several of the same forward pass.
    feature_layers: str = setting("several", choices=("last", "several"))
    neighbours: int = setting(3, at_least=1, at_most=10_000)
    embed_batch_size: int = setting(64, at_least=1, at_most=2**16)

    # Every task a function of its own images alone: exact forgetting and merging.
    independent: bool = False
    seed: int = setting(0, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt_kind == "shallow" and self.prompt_from_layer > 1:
            message = (
                f"prompt_from_layer = {self.prompt_from_layer}: a shallow prompt begins in layer 1; use "
                "prompt_kind = 'deep'"
            )
            raise SettingsError(message, code="setting-out-of-bounds", name="prompt_from_layer")
        if self.prototypes_per_step < -1:
            message = (
                f"prototypes_per_step = {self.prototypes_per_step}: give a count, 0 for none, or -1 for "
                "as many as the batch has images"
            )
            raise SettingsError(message, code="setting-out-of-bounds", name="prototypes_per_step")

    @property
    def reproduces_paper(self) -> bool:
        """Return True for CPP inference, which the paper computes in fp32."""
        return self.rule == "paper"

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Settings:
        """Return the settings of a preset with some changed.

        Args:
            name: One of `PRESETS`.
            **changes: Settings that differ from the preset's.

        Returns:
            The settings, validated.

        Raises:
            SettingsError: The preset or a setting is unknown, or a value is impossible.

        Examples:
            >>> from protosteer import Settings
            >>> Settings.preset("paper", epochs=20).epochs
            20
        """
        return cls.from_dict({**preset(name), **changes})

    def with_preset(self, name: str) -> Settings:
        """Return a copy with the values of a preset for every setting that any preset changes.

        Args:
            name: The preset.

        Returns:
            The copy.

        Raises:
            SettingsError: There is no such preset.
        """
        values, names = Settings.preset(name), {key for changes in _CHANGES.values() for key in changes}
        return self.replace(**{key: getattr(values, key) for key in names})

    def under(self, name: str) -> Settings:
        """Call `with_preset`, whose old name this is."""
        warnings.warn("Settings.under is now Settings.with_preset", DeprecationWarning, stacklevel=2)
        return self.with_preset(name)

    @classmethod
    def from_file(cls, values: Mapping[str, Any]) -> Settings:
        """Create settings from those of a file of any version; absent ones had the paper's values when it was written."""
        current = {name: value for name, value in values.items() if name not in RETIRED}
        return cls.preset("paper", **current)

    @classmethod
    def from_toml(cls, path: str | Path) -> Settings:
        """Read settings from a TOML file of `name = value` lines.

        Args:
            path: The file.

        Returns:
            The settings; those that the file does not name have their defaults.

        Raises:
            SettingsError: A name or value is not allowed.
        """
        values = read_toml(Path(path)).items()
        try:
            return cls.from_dict({n: v for n, v in values if n not in RETIRED or v != RETIRED[n]})
        except SettingsError as error:
            raise SettingsError(f"{path}: {error}", code=error.code, **error.details) from error

    def to_toml(self, path: str | Path) -> None:
        """Write all settings as `name = value` lines.

        Args:
            path: The file.
        """
        lines = [f"{name} = {json.dumps(value)}" for name, value in self.to_dict().items()]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def parse_value(text: str) -> Any:
    """Parse a value as typed: JSON (5, 0.1, true), or else a bare word."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also for numbers of very many digits
        return text.strip()


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(read_regular(path).decode("utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}", code="unreadable-settings", path=path) from error
    except (ValueError, RecursionError) as error:  # errors of tomllib and of the decoder are ValueErrors
        raise SettingsError(f"{path} is not valid TOML: {error}", code="invalid-toml", path=path) from error


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file of `name = value` lines."""
    values = load_toml(path)
    table = next((name for name, value in values.items() if isinstance(value, dict)), None)
    if table is not None:
        raise SettingsError(
            f"{path}: [{table}] is a table; give a plain list of name = value", code="invalid-toml", path=path
        )
    return values


# "fast", the default, trains one shared prompt, "best" one more per task, "instant" nothing.
_PAPER_TRAINING = {"epochs": 50, "batch_size": 256}
_PAPER = {"rule": "paper", "feature_layers": "last", "prompt_tasks": "all", **_PAPER_TRAINING}
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "best": {"prompt_tasks": "all"},
    "fast": {},
    "instant": {"prompts": False, **_PAPER_TRAINING},  # unused there; files of earlier versions say so
    # Between the two readings below: the authors' noise, the text's rows of the loss.
    "paper": _PAPER,
    "paper-text": {**_PAPER, "noise": "class"},
    "authors": {
        **_PAPER,
        "anchor_rows": "images+prototypes",
        "prototypes_per_step": 256,
        "prompt_start": "zero-then-previous",
    },
}


def preset(name: str) -> dict[str, Any]:
    """Return what a preset changes in the defaults."""
    if name not in PRESETS:
        message = f"preset {name!r} is unknown; choose one of {', '.join(PRESETS)}"
        raise SettingsError(message, code="unknown-preset", name=name)
    return dict(_CHANGES[name])


def unknown_setting(key: str, names: Sequence[str]) -> str:
    """Return a message that a setting is unknown, with the nearest of `names`."""
    return f"unknown setting '{key}'; {suggestion(key, names)}"


def _check_bounds(name: str, value: Any, bounds: Mapping[str, Any]) -> None:
    if "choices" in bounds and value not in bounds["choices"]:
        choices = ", ".join(bounds["choices"])
        raise SettingsError(
            f"{name} = {value!r}: choose one of {choices}", code="unknown-choice", name=name, value=value
        )
    for kind, fits, words in (
        ("at_least", operator.ge, "at least"),
        ("at_most", operator.le, "at most"),
        ("above", operator.gt, "greater than"),
    ):
        if kind in bounds and not fits(value, bounds[kind]):
            message = f"{name} = {value}: must be {words} {bounds[kind]}"
            raise SettingsError(message, code="setting-out-of-bounds", name=name, value=value)


def _convert(field: dataclasses.Field[Any], value: Any) -> Any:
    """Return the value in the field's type: an int is converted to a float field, nothing else is."""
    name = field.type if isinstance(field.type, str) else field.type.__name__  # text under postponed annotations
    expected_type = {"bool": bool, "int": int, "float": float, "str": str}[name]
    if type(value) is int and abs(value) >= 2**63:  # Python may not convert it to text
        raise SettingsError(f"{field.name}: the number is too large", code="setting-out-of-bounds", name=field.name)
    if expected_type is float and type(value) is int:
        value = float(value)
    if type(value) is not expected_type:
        text = f" = {value!r}" if isinstance(value, (bool, int, float, str)) else ""
        message = f"{field.name}{text[:80]}: must be {expected_type.__name__}, not {type(value).__name__}"
        raise SettingsError(message, code="wrong-setting-type", name=field.name)
    if isinstance(value, float) and not abs(value) <= MAX_FLOAT:  # NaN fails as well
        message = f"{field.name} = {value}: must be a number up to {MAX_FLOAT:g}"
        raise SettingsError(message, code="setting-out-of-bounds", name=field.name)
    return value
