"""The wheel, built from the source distribution, installs and runs outside the repository."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import protosteer
from conftest import REPOSITORY
from protosteer.backbones.registry import EARLIER

pytestmark = pytest.mark.slow

NOT_PACKED = [f"{name}.safetensors" for name in EARLIER.values()]


def run(*words: str, cwd: Path, **variables: str) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, env={**os.environ, **variables}, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_of_the_source_distribution_runs_in_an_empty_folder(tmp_path):
    pytest.importorskip("hatchling")
    hatchling = (sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path))
    run(*hatchling, "-t", "sdist", cwd=REPOSITORY)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.name == f"protosteer-{protosteer.__version__}.tar.gz"
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    run(*hatchling, "-t", "wheel", cwd=tmp_path / f"protosteer-{protosteer.__version__}")
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("protosteer/")}
    tracked = [
        p
        for p in (REPOSITORY / "src" / "protosteer").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts and p.name not in NOT_PACKED
    ]
    included = {name for name in packed if not name.startswith("protosteer/assets/paper/")}  # from experiments/
    assert included == {path.relative_to(REPOSITORY / "src").as_posix() for path in tracked} and packed - included

    place = tmp_path / "installed"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check")
    run(*pip, "--target", str(place), str(wheel), cwd=tmp_path)
    code = "import protosteer as ps; print(ps.__file__, ps.Backbone.load('nano').dim)"
    assert (
        run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(place))
        == f"{place / 'protosteer/__init__.py'} 128\n"
    )
    said = run(str(place / "bin" / "protosteer"), "--version", cwd=tmp_path, PYTHONPATH=str(place))
    assert said == f"protosteer {protosteer.__version__}\n"
