"""`protosteer adapt`: train a shared prompt on typical images, before any class is learned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from protosteer.cli.common import command, print_json, progress, say
from protosteer.cli.learn import resumes
from protosteer.cli.loading import PANEL, BackboneChoice, check_place, refuse_existing
from protosteer.cli.options import Json, NewLoading, Settings, parse_settings, path_of
from protosteer.cli.scanning import scan, warn_of_files
from protosteer.cli.torchrun import output_path
from protosteer.util.files import real, replacing, writing
from protosteer.util.text import counted, listed, printable

if TYPE_CHECKING:
    from protosteer.learner import Learner
    from protosteer.workflows.folder_scan import FolderScan
    from protosteer.workflows.shared_prompt import Adapted


@command(PANEL)
def adapt(
    folder: Annotated[
        Path,
        Argument(
            metavar="FOLDER",
            parser=path_of,
            help="Folder with one sub-folder of images per class, or a list with columns path and label.",
        ),
    ],
    out: Annotated[Path, Option("-o", "--out", help="Output file for the shared prompt.")],
    *,
    loading: NewLoading,
    set_: Settings = None,
    as_json: Json = False,
) -> None:
    """Train a shared prompt from images that are typical of what you will classify.

    `learn --adapted` begins a model with it: every class is then embedded under that prompt, and forgetting and
    merging stay exact. After Ctrl-C or a crash the same command resumes training.
    """
    from protosteer.data.sources import read_labelled
    from protosteer.learner import Learner
    from protosteer.settings import DEFAULT_PRESET, Settings

    out = output_path(out)
    refuse_existing(out)
    settings = Settings.preset(DEFAULT_PRESET, **parse_settings(set_ or []))  # checked before the folder is read
    folder_scan = scan(folder, read_labelled(folder))
    check_place(out, "--out")
    classes, images = counted(len(folder_scan.counts), "class"), counted(len(folder_scan.files), "image")
    say(f"{folder}: {classes}, {images}")
    warn_of_files(folder_scan)
    learner = Learner(BackboneChoice(loading, as_json).load(lambda: folder_scan.files), settings)
    adapted = _adapt(learner, folder_scan, out)
    if as_json:
        print_json({**adapted.describe(), "path": str(out)})
    say(f"Written: {out}, {out.stat().st_size:,} bytes; protosteer learn --adapted {out} begins a model with it")


def _adapt(learner: Learner, folder_scan: FolderScan, out: Path) -> Adapted:
    from protosteer.runtime.checkpoint import CheckpointFile
    from protosteer.workflows.learn_folder import TaskSlot
    from protosteer.workflows.shared_prompt import adapt

    checkpoint = CheckpointFile(TaskSlot.prepare(learner, folder_scan, None, 0.0).checkpoint_path(real(out)))
    try:
        with progress() as on_stage, writing(checkpoint.path, "--out"):
            adapted = adapt(learner.backbone, folder_scan, learner.settings, on_stage, checkpoint)
            with replacing(real(out)):
                refuse_existing(out)  # checked again: another process may have written it
                adapted.write(out)
    except KeyboardInterrupt:
        say(f"stopped; {out} is not there yet{resumes(checkpoint)}")
        raise
    finally:
        checkpoint.release()
    checkpoint.clear()
    return adapted


def tell(path: Path, as_json: bool) -> bool:
    """Print the description of a shared prompt for `inspect`; return False if the file is not one."""
    from protosteer.workflows.shared_prompt import is_adapted, read

    if not is_adapted(path):
        return False
    about = read(path).describe()
    if as_json:
        print_json(about)
        return True
    backbone, prompt = about["backbone"], about["prompt"]
    sizes = f"{counted(prompt['layers'], 'layer')}, {counted(prompt['length'], 'token')} each"
    lines = [
        f"{path}: a shared prompt ({about['fingerprint'][:12]}), not a model",
        f"backbone {backbone['name']} ({backbone['fingerprint'][:12]}), {backbone['image_size']}-pixel images",
        f"shared prompt, {sizes}, {prompt['bytes']:,} bytes",
        f"trained with {counted(about['images'], 'image')} of {counted(len(about['classes']), 'class')}: "
        f"{listed(about['classes'])}",
    ]
    print("\n".join(map(printable, lines)))
    return True
