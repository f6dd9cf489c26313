"""The container image: what matters of its files, and Docker's own check where a daemon answers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from conftest import REPOSITORY
from protosteer import __version__
from test_deploy import check_command, documents

yaml = pytest.importorskip("yaml", reason="compose.yaml is YAML")


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, lines joined: name and the rest."""
    text = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n\s*", "", "\n".join(one for one in text.split("\n") if not one.startswith("#")))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines.split("\n") if line)]


def all_of(name: str, found: list[tuple[str, str]]) -> list[str]:
    return [rest for one, rest in found if one == name]


def last_stage() -> list[tuple[str, str]]:
    found = instructions()
    starts = [place for place, (name, _) in enumerate(found) if name == "FROM"]
    return found[starts[-1] :]


def compose() -> dict[str, Any]:
    return yaml.safe_load((REPOSITORY / "compose.yaml").read_text(encoding="utf-8"))


def test_bases_are_slim_and_pinned_and_the_same():
    bases = {rest.split()[0] for rest in all_of("FROM", instructions())}
    (base,) = bases
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-[a-z]+", base)


def test_it_runs_as_a_user_by_number_who_is_not_root():
    found = last_stage()
    assert all_of("USER", found) == ["1000:1000"]
    assert [name for name, _ in found].index("USER") < [name for name, _ in found].index("ENTRYPOINT")
    (deployment, _) = documents("service.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["runAsUser"] == 1000


def test_installing_is_pinned_and_leaves_nothing_behind():
    found = instructions()
    runs = [run for run in all_of("RUN", found) if "pip install" in run]
    assert len(runs) == 2 and all("-c constraints.txt" in run for run in runs)
    assert any("PIP_NO_CACHE_DIR=1" in rest for rest in all_of("ENV", found))
    assert any("https://download.pytorch.org/whl/cpu" in rest for rest in all_of("ENV", found))  # without CUDA
    for run in all_of("RUN", found):
        if "apt-get install" in run:
            assert "--no-install-recommends" in run and "rm -rf /var/lib/apt/lists/*" in run
    assert not any(name == "ADD" or "latest" in rest for name, rest in found)


def test_it_begins_with_a_command_that_there_is_and_is_asked_where_it_answers():
    found = last_stage()
    (entry,), (command,) = (list(map(json.loads, all_of(name, found))) for name in ("ENTRYPOINT", "CMD"))
    check_command([*entry, *command])
    (port,), (volume,) = all_of("EXPOSE", found), all_of("VOLUME", found)
    assert command[1].startswith(f"{volume}/") and command[2:] == ["--host", "0.0.0.0"]
    (health,) = all_of("HEALTHCHECK", found)
    check = json.loads(health.partition("CMD ")[2])
    assert f"http://127.0.0.1:{port}/healthz" in check[-1]
    compile(check[-1], "HEALTHCHECK", "exec")


def test_it_is_made_of_what_is_let_in_and_there():
    lines = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines and all((REPOSITORY / name).exists() for name in let_in)
    copied = [rest.split()[:-1] for rest in all_of("COPY", instructions()) if not rest.startswith("--from")]
    assert {name for names in copied for name in names} == let_in


def test_compose_runs_the_image_within_bounds():
    services = compose()["services"]
    own = services["protosteer"]
    check_command(["protosteer", *own["command"]])
    assert "--allow-teach" in own["command"] and "PROTOSTEER_TOKEN" in own["environment"]
    backend = services["label-studio-backend"]
    (name,) = re.findall(r"http://([a-z-]+):8000", " ".join(backend["entrypoint"]))
    assert name in services and name in own["command"]  # the service must know itself by this name
    assert ("COPY", f"deploy/label_studio/backend.py {backend['entrypoint'][1]}") in instructions()
    for service in (own, backend):
        assert service["image"] == f"protosteer:{__version__}"
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert not service["image"].endswith("latest") and ":" in service["image"]


def test_manifests_name_the_image_of_this_version():
    images = re.findall(r"image: (\S+)", "".join(path.read_text() for path in (REPOSITORY / "deploy").glob("*.yaml")))
    assert {image.rpartition("/")[2] for image in images} == {
        f"protosteer:{__version__}",
        f"protosteer-ray:{__version__}",
    }


def test_docker_finds_nothing_to_say():
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True).returncode:
        pytest.skip("no Docker daemon answers")
    if subprocess.run([docker, "buildx", "version"], capture_output=True).returncode:
        pytest.skip("Docker has no buildx, which checks")
    done = subprocess.run([docker, "build", "--check", "."], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
