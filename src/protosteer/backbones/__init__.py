"""A backbone by name: its weights, the preprocessing that belongs to them, and their fingerprint.

Where weights are looked for, in this order: `weights=FILE`; the package itself (`nano`); the folder
`weights` in the cache, for files put there by hand; the hub's own cache; the network.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor

from protosteer.backbones.weights import fingerprint as weights_fingerprint
from protosteer.backbones.weights import load_vit, read_checkpoint, read_metadata
from protosteer.data.images import ImageSet
from protosteer.data.prefetch import prefetched
from protosteer.data.transforms import Preprocessing
from protosteer.errors import DataError, SettingsError, WeightsError
from protosteer.method.vit import ViT
from protosteer.util.files import cache_dir

NANO = "nano"
# Bytes of a layer's widest result, for which a batch is best on a CPU. Above 32 MiB, from where on glibc takes fresh
# memory from the system for every result, embedding was a quarter slower; much smaller batches have too little to do.
_CPU_WIDEST = 10 * 2**20
PRECISIONS = ("auto", "fp32", "bf16")
_HUB_FILES = ("config.json", "model.safetensors")
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


@dataclass(frozen=True)
class PaperWeights:
    """One of the checkpoints behind the paper's figures; all are ViT-B/16 for images of 224 pixels."""

    alias: str
    name: str
    licence: str
    pool: str = "token"
    url: str | None = None  # None: timm's hub has it
    md5: str = ""  # the digits that its authors publish

    parameters = 85_798_656
    image_size = 224


PAPER_WEIGHTS = (
    PaperWeights("vit", "vit_base_patch16_224.augreg_in21k_ft_in1k", "Apache-2.0"),
    PaperWeights("deit", "deit_base_patch16_224.fb_in1k", "Apache-2.0"),
    PaperWeights("dino", "vit_base_patch16_224.dino", "Apache-2.0"),
    PaperWeights(
        "mae",
        "mae_finetuned_vit_base",  # fine-tuned with labels; the self-supervised file is another one
        "CC-BY-NC-4.0",
        pool="mean",
        url="https://dl.fbaipublicfiles.com/mae/finetune/mae_finetuned_vit_base.pth",
        md5="1b25e9",
    ),
)


class Backbone:
    """A frozen ViT with the preprocessing of its weights. Nothing here changes after loading."""

    def __init__(
        self,
        name: str,
        vit: ViT,
        preprocessing: Preprocessing,
        fingerprint: str | None = None,
        source: Path | None = None,
        precision: str = "auto",
    ):
        if precision not in PRECISIONS:
            raise SettingsError(f"precision {precision!r} is unknown; choose one of {', '.join(PRECISIONS)}")
        self.name = name
        self.vit = vit
        self.preprocessing = preprocessing
        self.fingerprint = fingerprint or weights_fingerprint(vit.state_dict(), vit.config)
        self.source = source
        self._precision = precision

    @classmethod
    def load(
        cls,
        name: str,
        weights: str | Path | None = None,
        image_size: int | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        crop: float | None = None,
        heads: int | None = None,
        device: str | torch.device = "cpu",
        precision: str = "auto",
    ) -> Backbone:
        """`name`: nano, vit, deit, dino, mae, or a model on timm's hub; beside `weights=FILE`, any name.

        `precision`: fp32, bf16, or auto: bf16 on a CUDA device that has it, fp32 elsewhere.
        """
        paper = _paper_weights(name)
        full = full_name(name)
        path = Path(weights) if weights is not None else find_weights(full) or _fetch(full, paper)
        checkpoint = read_checkpoint(path, _config_beside(path))
        vit, fingerprint = load_vit(checkpoint, heads, image_size)
        if paper:
            _check_paper_weights(paper, vit, path)
        asked = {"mean": mean, "std": std, "crop": crop}
        told = _family_statistics(full, path) | checkpoint.about
        told |= {key: value for key, value in asked.items() if value is not None}
        preprocessing = _preprocessing(full, vit.config.image_size, told)
        return cls(full, vit, preprocessing, fingerprint, path, precision).to(device)

    @property
    def dim(self) -> int:
        return self.vit.config.dim

    @property
    def depth(self) -> int:
        return self.vit.config.depth

    @property
    def image_size(self) -> int:
        return self.vit.config.image_size

    @property
    def parameters(self) -> int:
        """How many numbers the frozen ViT has."""
        return sum(p.numel() for p in self.vit.parameters())

    @property
    def device(self) -> torch.device:
        return self.vit.cls_token.device

    def batch_size(self, most: int) -> int:
        """How many images to embed at once: at most so many, and on a CPU no more than is good for its memory."""
        if self.device.type != "cpu":
            return most
        config = self.vit.config
        widest = 4 * (1 + config.registers + config.patches) * max(config.mlp_dim, 3 * config.dim)
        return max(1, min(most, _CPU_WIDEST // widest))

    def to(self, device: str | torch.device) -> Backbone:
        self.vit.to(device)
        return self

    def prompt_shape(self, length: int, deep: bool = True, from_layer: int = 1) -> tuple[int, int, int]:
        """[S, L, D] of a prompt with `length` tokens, deep ones in the layers from `from_layer` on."""
        if length < 1:
            raise SettingsError(f"prompt length is {length}; it must be at least 1")
        if from_layer > 1 and not (deep and from_layer < self.depth):
            raise SettingsError(
                f"prompt_from_layer = {from_layer}: {self.name} has {self.depth} layers, so a deep prompt may begin "
                f"in layers 1 to {max(1, self.depth - 1)}, a shallow one in layer 1"
            )
        return (self.depth - from_layer + 1 if deep else 1, length, self.dim)

    @property
    def precision(self) -> str:
        """What the ViT computes in: "fp32", or "bf16" where rounding is coarser and the weights stay as they are."""
        if self._precision != "auto":
            return self._precision
        return "bf16" if self.device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"

    def embed(self, images: Tensor, prompt: Tensor | None = None) -> Tensor:
        """Normalised images [B, 3, H, W] -> [B, D]; `prompt` [S, L, D] for all, or [B, S, L, D], one each.

        A graph is kept only if the prompt wants its gradient; the backbone never has one.
        """
        if not images.is_floating_point():
            raise DataError(f"embed takes normalised images, not {images.dtype}; use embed_pixels for uint8")
        return self.rest(self.trunk(images, 0), 0, prompt)

    def trunk(self, images: Tensor, layers: int) -> Tensor:
        """Normalised images -> tokens [B, T, D] after the first `layers` layers, before any prompt."""
        with torch.no_grad(), self._autocast():
            tokens: Tensor = self.vit.trunk(images.to(self.vit.cls_token, non_blocking=True), layers)
        return tokens

    def rest(self, tokens: Tensor, layers: int, prompt: Tensor | None = None) -> Tensor:
        """As `embed`, from what `trunk` gave for the same number of layers."""
        place = self.vit.cls_token
        wanted = prompt is not None and prompt.requires_grad and torch.is_grad_enabled()
        with torch.set_grad_enabled(wanted), self._autocast():
            prompt = None if prompt is None else prompt.to(place)
            embeddings = self.vit.rest(tokens.to(place, non_blocking=True), layers, prompt)
        return embeddings.to(place.dtype)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def embed_pixels(self, pixels: Tensor, prompt: Tensor | None = None, batch_size: int = 64) -> Tensor:
        """uint8 [N, 3, h, w] -> float32 [N, D] on the CPU, by the evaluation transform, without a graph."""
        return self._embed_batches(len(pixels), iter(pixels.split(self.batch_size(batch_size))), prompt, None)

    def trunk_pixels(self, pixels: Tensor, layers: int, batch_size: int = 64) -> Tensor:
        """uint8 [N, 3, h, w] -> tokens [N, T, D] after the first `layers` layers, on the backbone's device."""
        batches = pixels.split(self.batch_size(batch_size))
        images = (self.preprocessing(some, self.device) for some in batches)
        return torch.cat([self.trunk(some, layers) for some in images])

    def embed_set(
        self,
        images: ImageSet,
        prompt: Tensor | None = None,
        batch_size: int = 64,
        on_batch: Callable[[int], None] | None = None,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """As `embed_pixels`, for all images of a set or some `rows`; `on_batch` hears how many are done."""
        order = range(len(images)) if rows is None else rows
        batch_size = self.batch_size(batch_size)
        batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
        fetched = prefetched(images, batches, device=self.device)
        return self._embed_batches(len(order), fetched, prompt, on_batch)

    def _embed_batches(
        self,
        count: int,
        batches: Iterator[Tensor],
        prompt: Tensor | None,
        on_batch: Callable[[int], None] | None,
    ) -> Tensor:
        if prompt is not None and prompt.ndim == 4 and len(prompt) != count:
            raise DataError(f"{len(prompt)} prompts for {count} images; give one per image, or one [S, L, D]")
        embeddings = torch.empty(count, self.dim)
        done = 0
        with torch.no_grad():
            for pixels in batches:
                some = slice(done, done + len(pixels))
                prompts = prompt[some] if prompt is not None and prompt.ndim == 4 else prompt
                images = self.preprocessing(pixels, self.device)
                embeddings[some] = self.embed(images, prompts).float().cpu()
                done = some.stop
                if on_batch:
                    on_batch(done)
        return embeddings

    def transform(self, image: Image.Image) -> Tensor:
        """A PIL image -> normalised [3, H, W], by the evaluation preprocessing of the weights."""
        return self.preprocessing(self.preprocessing.to_canvas(image).unsqueeze(0))[0]

    def describe(self) -> dict[str, Any]:
        """What a manifest should say of the backbone; plain data."""
        return {
            "name": self.name,
            "fingerprint": self.fingerprint,
            "source": self.source.name if self.source else None,
            "image_size": self.image_size,
            "dim": self.dim,
            "depth": self.depth,
            "heads": self.vit.config.heads,
            "preprocessing": self.preprocessing.to_dict(),
            "pool": self.vit.config.pool,
            "parameters": self.parameters,
            **({} if self.precision == "fp32" else {"precision": self.precision}),
        }

    def __repr__(self) -> str:
        return f"Backbone({self.name!r}, dim={self.dim}, depth={self.depth}, image_size={self.image_size})"


def choose_device(name: str) -> torch.device:
    """`auto`: a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises either, by device
        raise SettingsError(f"device {name!r} cannot be used here; try cpu, cuda, mps or auto") from error
    if device.type == "cuda":  # same seed, same bits: some kernels are not repeatable unless asked to be
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    return device


@dataclass(frozen=True)
class BackboneInfo:
    """One line of `protosteer backbones`. `path`: where the weights are, None if they are not on disk."""

    alias: str
    name: str
    parameters: int
    preprocessing: Preprocessing
    pool: str
    licence: str
    path: Path | None

    @property
    def on_disk(self) -> bool:
        return self.path is not None


def list_backbones() -> list[BackboneInfo]:
    """The backbones that have a short name. Looks at the disk alone, never at the network."""
    nano = find_weights(NANO)
    rows = [] if nano is None else [_nano_info(nano)]
    for paper in PAPER_WEIGHTS:
        path = find_weights(paper.name)
        told = _family_statistics(paper.name, path)
        preprocessing = _preprocessing(paper.name, paper.image_size, told)
        numbers = (paper.parameters, preprocessing, paper.pool)
        rows.append(BackboneInfo(paper.alias, paper.name, *numbers, paper.licence, path))
    return rows


def find_weights(name: str) -> Path | None:
    """The file of these weights, if it is on this disk."""
    if name == NANO:
        shipped = Path(str(resources.files("protosteer").joinpath("assets", "nano.safetensors")))
        return shipped if shipped.is_file() else None
    if Path(name).name != name:  # a name, possibly out of a stranger's model file, is not a path
        return None
    by_hand = (_weights_folder() / f"{name}{suffix}" for suffix in (".safetensors", ".pth", ".npz"))
    return next((path for path in by_hand if path.is_file()), None) or _find_in_hub_cache(name)


def _weights_folder() -> Path:
    return cache_dir() / "weights"


def _config_beside(path: Path) -> Path:
    """In the cache many weights share a folder, so a config there must carry the name of its file."""
    own = path.with_suffix(".json")
    return own if own.is_file() or path.parent == _weights_folder() else path.with_name("config.json")


def _find_in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config, weights = (try_to_load_from_cache(f"timm/{name}", file) for file in _HUB_FILES)
    except HFValidationError:  # not a name that the hub could have
        return None
    return Path(weights) if isinstance(config, str) and isinstance(weights, str) else None


def _fetch(name: str, paper: PaperWeights | None) -> Path:
    if name == NANO:
        raise WeightsError("nano.safetensors is missing from the installed package; install protosteer again")
    return _fetch_url(paper) if paper and paper.url else _fetch_from_hub(name)


def _fetch_from_hub(name: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    repo = f"timm/{name}"
    try:
        HfApi().model_info(repo, timeout=10)  # fails at once without a network; a download would keep trying
        _, weights = (hf_hub_download(repo, file) for file in _HUB_FILES)
        return Path(weights)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise WeightsError(
            f"no backbone is called {name!r}: use {_short_names()}, a model name of timm's on the hub, "
            "or pass weights=FILE"
        ) from error
    except Exception as error:  # the hub's client raises the errors of whatever HTTP library it is built on
        raise WeightsError(
            f"cannot fetch {repo} from the hub ({type(error).__name__}): put its model.safetensors at "
            f"{_weights_folder() / name}.safetensors, or pass weights=FILE (short names: {_short_names()})"
        ) from error


def _fetch_url(paper: PaperWeights) -> Path:
    """Download under a temporary name; only a file with the published checksum gets its own."""
    import pooch

    assert paper.url is not None
    final = _weights_folder() / Path(paper.url).name
    try:
        part = Path(pooch.retrieve(paper.url, known_hash=None, fname=f"{final.name}.part", path=final.parent))
    except Exception as error:  # as above: any HTTP library's errors
        raise WeightsError(
            f"cannot fetch {paper.url} ({type(error).__name__}): put {final.name} into {final.parent}, "
            "or pass weights=FILE"
        ) from error
    found = pooch.file_hash(str(part), alg="md5")
    if not found.startswith(paper.md5):
        part.unlink()
        raise WeightsError(f"{paper.url}: md5 {found} does not begin with {paper.md5}; fetch it again")
    return part.replace(final)


def _short_names() -> str:
    return ", ".join([NANO, *(paper.alias for paper in PAPER_WEIGHTS)])


def full_name(name: str) -> str:
    """What a backbone is called once it is loaded: short names and the prefix timm/ are resolved."""
    paper = _paper_weights(name)
    return paper.name if paper else name.removeprefix("timm/")


def _paper_weights(name: str) -> PaperWeights | None:
    plain = name.removeprefix("timm/")
    return next((paper for paper in PAPER_WEIGHTS if plain in (paper.alias, paper.name)), None)


def _check_paper_weights(paper: PaperWeights, vit: ViT, path: Path) -> None:
    """A short name means one checkpoint; a file of another architecture must not pass under it."""
    config = vit.config
    if paper.pool == "mean" and config.pool == "token":
        raise WeightsError(
            f"{path} has no fc_norm, so it is not the fine-tuned MAE but probably the self-supervised one; "
            f"'{paper.alias}' means {paper.name}.pth"
        )
    if (config.dim, config.depth, config.patch_size, config.pool) != (768, 12, 16, paper.pool):
        raise WeightsError(
            f"{path} is not {paper.name}: width {config.dim}, depth {config.depth}, "
            f"patch {config.patch_size}, {config.pool} pooling; give it another name than '{paper.alias}'"
        )


def _family_statistics(name: str, path: Path | None) -> dict[str, Any]:
    """Preprocessing that a family of weights is known for, from its usual name; empty if it tells nothing."""
    words = re.split(r"[^a-z0-9]+", name.lower())

    def has(*starts: str) -> bool:
        return any(word.startswith(starts) for word in words)

    if has("dinov2"):
        return IMAGENET | {"crop": 1.0}
    if "mae" in words or has("deit", "dino"):
        # MAE's authors evaluate on 256 -> 224; timm's 0.9 stands for all other files.
        return IMAGENET | {"crop": 0.875 if words[0] == "mae" else 0.9}
    if (words[0] == "vit" and has("augreg", "orig")) or (path is not None and path.suffix.lower() == ".npz"):
        return HALF | {"crop": 0.9}
    return {}


def _preprocessing(name: str, image_size: int, told: dict[str, Any]) -> Preprocessing:
    if told.get("mean") is None or told.get("std") is None:
        raise WeightsError(f"nothing tells how {name!r} normalises its pixels; pass mean= and std=")
    options = {key: told[key] for key in ("crop", "interpolation") if told.get(key) is not None}
    return Preprocessing(image_size, tuple(told["mean"]), tuple(told["std"]), **options)


def _nano_info(path: Path) -> BackboneInfo:
    """From the header alone."""
    with safe_open(path, framework="pt") as file:
        about = read_metadata(file.metadata())
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (not a dict)
    pool = "mean" if "fc_norm.weight" in shapes else "token"
    preprocessing = _preprocessing(NANO, about["image_size"], about)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    return BackboneInfo(NANO, NANO, parameters, preprocessing, pool, about["licence"], path)
