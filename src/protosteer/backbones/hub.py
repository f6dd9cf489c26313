"""Find a backbone's weights on disk, or download them.

Searched in this order: the package itself; the folder `weights` in the cache, for files a user put there; the
hub's own cache; the network.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from importlib import resources
from pathlib import Path

from protosteer.backbones.registry import EARLIER, KNOWN, BackboneInfo, known_weights
from protosteer.data.downloads import Remote, fetch
from protosteer.errors import DataError, WeightsError
from protosteer.util.files import cache_dir, replacing

_HUB_FILES = ("config.json", "model.safetensors")
_BY_HAND = (".safetensors", ".pth", ".npz")
_PLAIN_VITS = ("vit_", "deit")  # prefixes of timm's names


def find_weights(name: str) -> Path | None:
    """Return the path of the named weights; None if they are not on this disk."""
    info = known_weights(name)
    if (info and info.shipped) or name in EARLIER.values():
        asset = Path(str(resources.files("protosteer").joinpath("assets", f"{name}.safetensors")))
        if asset.is_file():  # earlier ones are in the source repository, not in the wheel
            return asset
    if Path(name).name != name:  # a name may come from an untrusted model file: never a path
        return None
    by_hand = (_folder() / f"{name}{suffix}" for suffix in _BY_HAND)
    return next((path for path in by_hand if path.is_file()), None) or _find_in_hub_cache(name)


def fetch_weights(name: str) -> Path:
    """Download the named weights and return their path."""
    if name in EARLIER.values():
        place = _folder() / f"{name}.safetensors"
        message = (
            f"{name}, an earlier mini, is not in the package: copy src/protosteer/assets/{place.name} of the source "
            f"repository to {place}, or pass weights=FILE"
        )
        raise WeightsError(message, code="replaced-weights", name=name)
    info = known_weights(name)
    return _fetch_url(info.url, info.md5) if info and info.url else _fetch_from_hub(name)


def list_backbones() -> list[BackboneInfo]:
    """List the backbones that have a short name, with their files on this disk; never use the network."""
    return [replace(info, path=find_weights(info.name)) for info in KNOWN]


def names_on_disk() -> list[str]:
    """List every backbone whose weights are on this disk: shipped, put there by hand, or in the hub's cache."""
    short_names = [short_names.name for short_names in KNOWN]
    by_hand = sorted(path.stem for path in _folder().glob("*") if path.suffix in _BY_HAND)
    names = dict.fromkeys([*short_names, *by_hand, *_names_in_hub_cache()])
    return [name for name in names if find_weights(name)]


def may_fetch() -> bool:
    """Return False if the user has set the hub's client to offline mode."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE


def place_for(info: BackboneInfo) -> Path:
    """Return the path at which a file put there by hand is found."""
    return _folder() / (Path(info.url).name if info.url else f"{info.name}.safetensors")


def config_beside(path: Path) -> Path:
    """Return the path of the config that belongs to a weights file.

    In the cache many weights share a folder, so a config there carries the name of its weights.
    """
    config = path.with_suffix(".json")
    return config if config.is_file() or path.parent == _folder() else path.with_name("config.json")


def _folder() -> Path:
    return cache_dir() / "weights"


def _find_in_hub_cache(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config, weights = (try_to_load_from_cache(f"timm/{name}", file) for file in _HUB_FILES)
    except HFValidationError:  # not a name that the hub could have
        return None
    return Path(weights) if isinstance(config, str) and isinstance(weights, str) else None


def _names_in_hub_cache() -> list[str]:
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--timm--*")
    names = sorted(folder.name.removeprefix("models--timm--") for folder in folders)
    return [name for name in names if name.startswith(_PLAIN_VITS)]


def _fetch_from_hub(name: str) -> Path:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    repo, aliases = f"timm/{name}", ", ".join(info.alias for info in KNOWN)
    try:
        HfApi().model_info(repo, timeout=10)  # fails at once without a network; a download would keep trying
        _, weights = (hf_hub_download(repo, file) for file in _HUB_FILES)
        return Path(weights)
    except (RepositoryNotFoundError, HFValidationError) as error:
        message = (
            f"no backbone is called {name!r}: use {aliases}, a model name of timm's on the hub, or pass weights=FILE"
        )
        raise WeightsError(message, code="unknown-backbone", name=name) from error
    except Exception as error:  # the hub's client raises the errors of whatever HTTP library it is built on
        message = (
            f"cannot fetch {repo} from the hub ({type(error).__name__}): put its model.safetensors at "
            f"{_folder() / name}.safetensors, or pass weights=FILE (short names: {aliases})"
        )
        raise WeightsError(message, code="download-failed", name=name) from error


def _fetch_url(url: str, md5: str) -> Path:
    page, _, file = url.rpartition("/")
    final = _folder() / file
    with suppress(OSError):  # the download says so
        final.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(final, math.inf):  # another process may be downloading it
            return final if final.is_file() else fetch(Remote(file, None, (page,), md5), _folder())
    except DataError as error:
        raise WeightsError(
            f"{error}; put {url} into {_folder()}, or pass weights=FILE", code="download-failed", name=url
        ) from error
