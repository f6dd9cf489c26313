"""Define the routes of one model, which exist twice: for the first one, and below /models/{model} for a named one."""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path, Query
from fastapi.responses import PlainTextResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request

from protosteer.serve import schemas
from protosteer.serve.limits import RequestError
from protosteer.serve.middleware import NAMED_MODEL
from protosteer.serve.model_store import LAST
from protosteer.serve.registry import ModelRegistry
from protosteer.serve.service import Service
from protosteer.workflows.model_summary import correction

Top = Annotated[int, Query(ge=1, le=100, description="How many classes to name.")]
Reject = Annotated[float, Query(ge=0, lt=1, description="Share of known images that may count as unknown.")]
ClassName = Annotated[str, Query(alias="class", description="What is on the image; may be new.")]
CorrectionId = Annotated[str, Path(description=f"One of those that GET /corrections lists, or: {LAST}")]
Name = Annotated[str, Path(description="One of those that GET /models lists.")]


async def _select_service(request: Request) -> Service:
    service: Service = request.state.service  # set by a dependency of the whole router
    return service


Selected = Annotated[Service, Depends(_select_service)]


async def _authorise(
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))], service: Selected
) -> None:
    service.authorise(bearer.credentials if bearer else None)


_ALLOWED = [Depends(_authorise)]
# Of routes that learn from images.
_TEACHES: dict[str, Any] = {
    "status_code": 201,
    "openapi_extra": schemas.IMAGES,
    "responses": schemas.errors(401, 403, 408, 409, 413, 422, 503, 507),
    "dependencies": _ALLOWED,
}

router = APIRouter()


def add_routes(app: FastAPI, models: ModelRegistry) -> None:
    """Add every route of the service to the application."""

    async def first_model(request: Request) -> None:
        request.state.service = models.first

    async def named_model(request: Request, model: Name) -> None:
        request.state.service = models.find(model)

    routes = _predict_router(models.first.reject)  # first, since routes are tried in this order
    routes.include_router(router)
    errors = schemas.errors(404, 422)
    app.include_router(routes, dependencies=[Depends(first_model)])
    app.include_router(routes, prefix=NAMED_MODEL, dependencies=[Depends(named_model)], responses=errors)
    _add_overviews(app, models)


def _predict_router(default_reject: float) -> APIRouter:
    """Return the route whose description names what the service was started with."""
    router = APIRouter()

    @router.post(
        "/predict",
        response_model=schemas.Predictions,
        openapi_extra=schemas.IMAGES,
        responses=schemas.errors(408, 413, 422, 503, 507),
    )
    async def predict(request: Request, service: Selected, top: Top = 5, reject: Reject = default_reject) -> Any:
        """What is on each image: send one or several."""
        rows = await service.predict(request, top, reject)
        # Not validated against the schema: that would take longer than everything else here.
        body = json.dumps({"predictions": rows}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return Response(body.encode("utf-8", "replace"), media_type="application/json")

    return router


@router.get("/classes", response_model=schemas.Classes)
def classes(service: Selected) -> Any:
    """All classes, in the order in which they were learned."""
    return {"classes": service.store.current.classes()}


@router.get("/thumbnails/{name:path}", response_model=schemas.Thumbnails, responses=schemas.errors(404, 422))
def thumbnails(name: str, service: Selected) -> Any:
    """Small pictures of images that a class was taught, where they were kept and are to be shown."""
    jpegs = service.store.current.thumbnails.get(name)
    if jpegs is None:
        raise RequestError(404, f"of class '{name}' there are no thumbnails here; GET /classes says of which there are")
    return schemas.Thumbnails(class_=name, jpegs=[base64.b64encode(jpeg).decode() for jpeg in jpegs])


@router.get("/model", response_model=schemas.Model)
def model(service: Selected) -> Any:
    """What the model holds: tasks, classes, bytes, settings, backbone."""
    current = service.store.current
    return {
        **current.description,
        "name": service.name,
        "teaching": service.teaching,
        "reject": service.reject,
        "calibrated": current.calibrated,
        "reliability": current.reliability,
        "trainable": current.trainable(),
    }


@router.get("/map", response_model=schemas.Map)
def map_of_classes(service: Selected) -> Any:
    """Where the classes lie in two dimensions, coordinates in [-1, 1]."""
    current = service.store.current
    points = [{"name": n, "task": t, "x": x, "y": y} for n, t, x, y in current.projection.classes]
    return {"classes": points, "tasks": current.memory.task_names}


@router.post("/classes/{name:path}", response_model=schemas.LearnResult, **_TEACHES)
async def learn(request: Request, name: str, service: Selected, train: bool = False) -> Any:
    """Teach a class from a few images: it is known at once. train: give it a prompt of its own, later."""
    return await service.learn(request, name, train)


@router.get("/jobs/{id}", response_model=schemas.JobStatus, responses=schemas.errors(404, 422))
async def job(id: str, service: Selected) -> Any:
    """How far a training is."""
    return service.jobs.get(id)


@router.delete(
    "/classes/{name:path}",
    response_model=schemas.Forgotten,
    responses=schemas.errors(401, 403, 404, 409, 422, 507),
    dependencies=_ALLOWED,
)
def forget(name: str, service: Selected) -> Any:
    """Forget a class; the answer says what that guarantees."""
    return dataclasses.asdict(service.store.forget(name))


@router.post("/corrections", response_model=schemas.Corrected, **_TEACHES)
async def correct(request: Request, name: ClassName, service: Selected) -> Any:
    """Tell what is on one image that the model was wrong about: it knows at once, and it can be undone."""
    return await service.correct(request, name)


@router.post("/confirmations", response_model=schemas.Corrections, **_TEACHES)
async def confirm(request: Request, service: Selected) -> Any:
    """Say that the answers for one or several images are right: they are learned, and probabilities stay true."""
    return {"corrections": list(map(correction, await service.confirm(request)))}


@router.get(
    "/corrections", response_model=schemas.Corrections, responses=schemas.errors(401, 403), dependencies=_ALLOWED
)
def corrections(service: Selected) -> Any:
    """All corrections that hold. They name files, which is why the token is asked for."""
    return {"corrections": list(map(correction, service.store.current.memory.corrections))}


@router.delete(
    "/corrections/{id}",
    response_model=schemas.TakenBack,
    responses=schemas.errors(401, 403, 404, 409, 422, 507),
    dependencies=_ALLOWED,
)
def undo(id: CorrectionId, service: Selected) -> Any:
    """Take a correction back, as if it had never been made."""
    return {"taken_back": correction(service.store.undo(id))}


def _add_overviews(app: FastAPI, models: ModelRegistry) -> None:
    """Add the routes about the whole service."""

    @app.get("/models", response_model=schemas.Models)
    def all_models() -> Any:
        """The models that are served; the first is the one of the routes that name none."""
        return {"models": [_entry(service) for service in models.services.values()]}

    @app.get("/healthz", response_model=schemas.Health)
    async def health() -> Any:
        """Whether the service runs."""
        return {"status": "ok"}

    gauges: dict[str, tuple[str, Callable[[Service], int]]] = {
        "queue_images": ("Images that wait for the model.", lambda s: s.batcher.length),
        "jobs": ("Trainings that wait or run.", lambda s: s.jobs.open_count),
        "classes": ("Classes of the model.", lambda s: len(s.store.current.memory.classes)),
        "corrections": ("Corrections that hold.", lambda s: len(s.store.current.memory.corrections)),
    }
    metrics = models.first.metrics
    for gauge, (meaning, value) in gauges.items():
        served = models.services.items()
        metrics.gauge(gauge, meaning, {name: functools.partial(value, service) for name, service in served})

    @app.get("/metrics", response_class=PlainTextResponse)
    def prometheus() -> Any:
        """Counters in Prometheus' text format."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _entry(service: Service) -> schemas.Listed:
    current = service.store.current
    return schemas.Listed(
        name=service.name,
        file=service.store.path.name,
        backbone=current.learner.backbone.name,
        classes=len(current.memory.classes),
        tasks=len(current.memory.tasks),
    )
