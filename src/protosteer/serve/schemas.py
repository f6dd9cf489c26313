"""Schemas of the answers, as /openapi.json describes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from protosteer.serve.uploads import FIELD


class Error(BaseModel):
    """An error."""

    detail: str = Field(description="One line: what was wrong, where, what to do.")


class Health(BaseModel):
    """The service runs."""

    status: Literal["ok"] = "ok"


class Candidate(BaseModel):
    """One of the most probable classes."""

    label: str
    task: str
    probability: float
    similarity: float = Field(description="How like the class it is, as a cosine.")


class Prediction(BaseModel):
    """The prediction for one image."""

    name: str = Field(description="The file's name, as it was sent.")
    label: str
    probability: float = Field(description="Calibrated, unless the model's rule is the paper's.")
    similarity: float = Field(description="How like the class of this label it is, as a cosine.")
    energy: float
    unknown: bool | None = Field(description="Whether it is like no class; null if the model cannot tell.")
    task: str = Field(description="The task that the label was first learned in.")
    candidates: list[str] = Field(description="Tasks whose task-specific prompts were tried.")
    passes: int = Field(description="Forward passes that it took.")
    top: list[Candidate]
    position: tuple[float, float] = Field(description="Where it lies on /map.")


class Predictions(BaseModel):
    """One prediction per image, in the order sent."""

    predictions: list[Prediction]


class Class(BaseModel):
    """A class of the model."""

    name: str
    task: str = Field(description="The task that it was first learned in.")
    tasks: list[str] = Field(description="All tasks that it was learned in.")
    images: int
    centroids: int = Field(description="Prototypes that are kept of it.")
    thumbnails: int = Field(description="Small pictures of it that can be asked for.")
    checked: int = Field(description="Stored images that were each asked as if not learned.")
    right: int = Field(description="How many of them are recognised.")
    confused_with: str | None = Field(description="What the others are most often taken for.")


class Thumbnails(BaseModel):
    """Thumbnails of a class."""

    class_: str = Field(serialization_alias="class")
    jpegs: list[str] = Field(description="Base64.")


class Classes(BaseModel):
    """All classes."""

    classes: list[Class]


class Bin(BaseModel):
    """Answers of similar probability."""

    images: int
    confidence: float | None = Field(description="Mean probability of the answers, in percent.")
    accuracy: float | None = Field(description="How many of them are right, in percent.")


class Reliability(BaseModel):
    """How often answers of a given probability are right."""

    images: int = Field(description="Learned ones, each asked as if it had not been learned.")
    calibration_error: float = Field(description="Mean distance of probability and accuracy, in percent.")
    bins: list[Bin] = Field(description="By the probability of the answer, from 0 to 1 in equal steps.")


class Model(BaseModel):
    """A model as `protosteer inspect --json` describes it, and the service's settings."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(description="What the model is called here.")
    teaching: bool
    reject: float
    calibrated: bool = Field(description="Whether unknown images can be told.")
    reliability: Reliability | None = Field(description="How often answers of some probability are right.")
    trainable: bool = Field(description="Whether a taught class can get a prompt of its own.")


class Listed(BaseModel):
    """A served model."""

    name: str
    file: str
    backbone: str
    classes: int
    tasks: int


class Models(BaseModel):
    """All served models."""

    models: list[Listed] = Field(description="The first is the one of the routes that name none.")


class Place(BaseModel):
    """A class on the map."""

    name: str
    task: str
    x: float
    y: float


class Map(BaseModel):
    """The class map."""

    method: Literal["pca"] = "pca"
    classes: list[Place]
    tasks: list[str]


class LearnResult(BaseModel):
    """What was learned."""

    class_: str = Field(serialization_alias="class")
    task: str
    images: int
    job: str | None = Field(description="Ask for it at /jobs/{id}.")


class JobStatus(BaseModel):
    """The progress of a training job."""

    id: str
    class_: str = Field(serialization_alias="class")
    state: Literal["waiting", "training", "done", "failed"]
    done: int = Field(description="Steps of the training.")
    total: int = Field(description="0 until it is known.")
    seconds_left: float | None
    message: str

    @property
    def ended(self) -> bool:
        """Return True if the job is over."""
        return self.state in ("done", "failed")


class Forgotten(BaseModel):
    """What was forgotten."""

    classes: list[str]
    tasks: list[str]
    bytes: int
    exact: bool
    guarantee: str


class Correction(BaseModel):
    """A correction."""

    correction: str = Field(description="What it can be taken back by.")
    date: str | None
    image: str | None = Field(description="The name of its file.")
    taken_for: str
    class_: str = Field(alias="class")
    confirmed: bool = Field(description="Whether the answer was right, and was confirmed.")


class Corrected(Correction):
    """A correction that was just made, and what the model answers now."""

    new_class: bool = Field(description="Whether the class was not known before.")
    answer: str = Field(description="The class predicted now.")
    probability: float = Field(description="Of this answer.")


class Corrections(BaseModel):
    """Corrections and confirmations."""

    corrections: list[Correction] = Field(description="The last one at the end.")


class TakenBack(BaseModel):
    """A correction that was undone."""

    taken_back: Correction


IMAGES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": [FIELD],
                    "properties": {FIELD: {"type": "array", "items": {"type": "string", "format": "binary"}}},
                }
            }
        },
    }
}
"""OpenAPI description of a body with images, which `uploads` reads without the framework."""

_MEANINGS = {
    401: "No token, or a wrong one",
    403: "Teaching is not allowed",
    404: "No such model, class, job or correction",
    408: "The images took too long to arrive",
    409: "The class is the only one, or the file changed on disk",
    413: "Too many images, bytes or pixels",
    422: "A bad image, which is named, or a bad option",
    503: "Too much to do; Retry-After says when to try again",
    507: "No space to write the model, or for large uploads",
}


Errors = dict[int | str, dict[str, Any]]


def errors(*statuses: int) -> Errors:
    """Return OpenAPI responses for HTTP statuses."""
    return {status: {"model": Error, "description": _MEANINGS[status]} for status in statuses}
