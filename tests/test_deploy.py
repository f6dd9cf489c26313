"""The examples for Kubernetes: YAML whose commands, routes and versions exist. No cluster is asked."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer

from conftest import REPOSITORY
from protosteer.cli import app

yaml = pytest.importorskip("yaml", reason="the manifests are YAML")
DEPLOY = REPOSITORY / "deploy"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


def check_command(words: list[str]) -> None:
    """Parsed as the command line would, but not run."""
    program, command, *arguments = words
    assert program == "protosteer"
    typer.main.get_command(app).commands[command].make_context(command, arguments)


def test_there_are_no_other_manifests_than_those_that_are_checked():
    assert {path.name for path in DEPLOY.glob("*.yaml")} == {"rayjob-predict.yaml", "service.yaml"}


def test_the_job_predicts_by_ray_and_its_worker_fits_its_nodes():
    (job,) = documents("rayjob-predict.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    words = shlex.split(job["spec"]["entrypoint"])
    check_command(words)
    assert words[words.index("--engine") + 1] == "ray"
    cluster = job["spec"]["rayClusterSpec"]
    pinned = re.search(r"^ray==(\S+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert cluster["rayVersion"] == pinned[1]
    (group,) = cluster["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    threads = int(words[words.index("--threads") + 1])
    assert int(container["resources"]["requests"]["cpu"]) % threads == 0


def test_the_service_is_probed_where_it_answers():
    deployment, service = documents("service.yaml")
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    check_command([*container["command"], *container["args"]])
    routes = (REPOSITORY / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    for probe in ("readinessProbe", "livenessProbe"):
        assert f"`GET {container[probe]['httpGet']['path']}`" in routes
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in deployment["spec"]["template"]["spec"]["volumes"]}
