"""Share models on the Hugging Face Hub: a model card, `push` and `pull`.

A repository holds one model file and its card. What is pulled is checked as any model file from an untrusted source.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import protosteer
from protosteer.backbones import full_name
from protosteer.backbones.registry import NOT_STATED, known_weights
from protosteer.errors import ProtosteerError
from protosteer.model import file as model_file
from protosteer.model.file import Model
from protosteer.model.memory import Memory
from protosteer.rules import Reader
from protosteer.util.files import read_regular
from protosteer.util.statistics import Accuracy, calibration_error, reliability
from protosteer.util.text import counted, one_line

MODEL_FILE = "model.protosteer"
CARD_FILE = "README.md"
MAX_CARD_CLASSES = 1_000  # rows of the card's table

_CARD = """\
---
{metadata}
---

# {title}

An image classifier of {classes}, learned from {images} with protosteer.

With protosteer {version} or newer installed:

```sh
protosteer pull {repo}
protosteer predict {file} photo.jpg
```

```python
import protosteer as ps

learner = ps.Learner.from_pretrained("{repo}")
learner.predict(["photo.jpg"]).labels
```

## How good it is

{quality}

## Classes

| class | images |
|---|---|
{table}

## Backbone

- Name: `{backbone}`; its weights are not in this repository.
- Fingerprint (SHA-256 of the weights): `{fingerprint}`
- Licence of the weights: {licence}

## Limits

- The model answers with one of its classes for any picture. `--reject 0.05` marks pictures that are unlike all of them;
  pictures that resemble a class pass.
- Pictures that differ from the learned ones (other cameras, other places) may be classified less accurately. Measure on
  your own: `protosteer evaluate {file} FOLDER`.
- The file holds no images, but feature vectors of every class, of single images where a class has few, and class names and
  digests of files. Share it only if you may share what they reveal.
"""


def model_card(model: Model, reader: Reader, repo: str, licence: str | None = None) -> str:
    """Return the card of a model as Markdown with the Hub's metadata.

    Args:
        model: Contents of the model file.
        reader: The reader of its records, `reader_of(model.memory, model.settings)`.
        repo: The repository, "user/name".
        licence: Licence of the model, an identifier of the Hub such as "apache-2.0"; None: not stated.
    """
    table, info = model.memory.table, known_weights(model.backbone["name"])
    images = Counter[str]()
    for name, count in zip(table.names, table.images.tolist(), strict=True):
        images[name] += count
    rows = [f"| {_cell(name)} | {images[name]:,} |" for name in model.memory.classes[:MAX_CARD_CLASSES]]
    if remaining := len(images) - len(rows):
        rows.append(f"| and {remaining:,} more | |")
    name = repo.rpartition("/")[2]
    metadata = {"library_name": "protosteer", "pipeline_tag": "image-classification"}
    metadata |= {"license": licence} if licence else {}
    metadata |= {"base_model": f"timm/{full_name(info.name)}"} if info and not (info.shipped or info.url) else {}
    lines = [f"{key}: {json.dumps(value)}" for key, value in metadata.items()]
    return _CARD.format(
        metadata="\n".join([*lines, 'tags: ["protosteer", "continual-learning"]']),
        title=name,
        version=protosteer.__version__,
        repo=repo,
        file=f"{name}.protosteer",
        classes=counted(len(images), "class"),
        images=counted(sum(images.values()), "image"),
        quality=_quality(reader),
        table="\n".join(rows),
        backbone=model.backbone["name"],
        fingerprint=model.backbone["fingerprint"],
        licence=info.licence if info else NOT_STATED,
    )


def push(
    model: Model,
    reader: Reader,
    repo: str,
    private: bool | None = None,
    licence: str | None = None,
    token: str | None = None,
) -> str:
    """Upload a model and its card in one commit; the repository is created if there is none.

    The uploaded file holds no paths and file names of this machine.

    Returns:
        The address of the repository.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    card = model_card(model, reader, repo, licence)
    api = HfApi(token=token, library_name="protosteer", library_version=protosteer.__version__)
    files = {MODEL_FILE: without_local_names(model).pack(), CARD_FILE: card.encode()}
    with _hub_errors(f"cannot push to {repo}"):
        url = api.create_repo(repo, private=private, exist_ok=True)
        operations = [CommitOperationAdd(name, data) for name, data in files.items()]
        summary = f"{counted(len(model.memory.classes), 'class')}, protosteer {protosteer.__version__}"
        api.create_commit(url.repo_id, operations, commit_message=summary)
    return str(url)


def pull(repo: str, revision: str | None = None, token: str | None = None) -> Model:
    """Download a model, or take it from the Hub's cache, and check it.

    Raises:
        ProtosteerError: The Hub has no such model, or cannot be reached.
        ModelFileError: The repository's file is not a model file.
    """
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    with _hub_errors(f"cannot pull {repo}"):
        reachable = True
        try:
            HfApi(token=token).model_info(repo, revision=revision, timeout=10)
        except (HfHubHTTPError, HFValidationError):
            raise
        except Exception:  # no network: the cache may have it; a download would keep trying
            reachable = False
        path = hf_hub_download(repo, MODEL_FILE, revision=revision, token=token, local_files_only=not reachable)
    return model_file.unpack(read_regular(Path(path)), Path(repo))


def without_local_names(model: Model) -> Model:
    """Return the model without the path of its weights and the names of files that were corrected."""
    tasks = (
        dataclasses.replace(task, metadata=dataclasses.replace(task.metadata, file=None)) for task in model.memory.tasks
    )
    return dataclasses.replace(model, backbone={**model.backbone, "weights": None}, memory=Memory(tasks))


def _quality(reader: Reader) -> str:
    loo = reader.loo_predictions()
    if loo is None or not len(loo.correct) or len(reader.index.classes) < 2:
        return "Not measured."
    accuracy = Accuracy(int(loo.correct.sum()), len(loo.correct))
    error = calibration_error(reliability(loo.confidence, loo.correct))
    return (
        f"- Accuracy: {accuracy} by leave-one-out over {counted(accuracy.images, 'stored image')}, with the 95 % interval.\n"
        f"- Calibration error of the probabilities: {error:.1f} % over the same images."
    )


def _cell(text: str) -> str:
    """Return text for a cell of a Markdown table, with nothing in it that Markdown or HTML would interpret."""
    return "".join(f"&#{ord(c)};" if c in "|`*_<>&[]\\~#" else c for c in one_line(text))


@contextmanager
def _hub_errors(failure: str) -> Iterator[None]:
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )  # fmt: skip

    try:
        yield
    except LocalEntryNotFoundError as error:
        message = f"{failure}: the Hub cannot be reached, and its cache on this disk has no copy; check the network"
        raise ProtosteerError(message, code="hub-failed") from error
    except EntryNotFoundError as error:
        raise ProtosteerError(f"{failure}: it has no {MODEL_FILE}", code="hub-not-found") from error
    except RepositoryNotFoundError as error:
        message = f"{failure}: there is no such repository, or it is private; check the name, or run: hf auth login"
        raise ProtosteerError(message, code="hub-not-found") from error
    except HFValidationError as error:
        raise ProtosteerError(f"{failure}: give it as USER/NAME ({one_line(str(error))})", code="hub-name") from error
    except Exception as error:  # the hub's client raises the errors of whatever HTTP library it is built on
        reason = f"{type(error).__name__}: {one_line(str(error))}"
        message = f"{failure} ({reason}); check the network, and log in with: hf auth login"
        raise ProtosteerError(message, code="hub-failed") from error
