"""Predict with this exported model: python predict.py IMAGE...

Needs onnxruntime, numpy (which comes with it) and Pillow, which reads the image files:
pip install onnxruntime pillow
From other programs: `Model().predict(["a.jpg", "b.png"])`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

HERE = Path(__file__).resolve().parent
BATCH = 32
REJECT = "0.05"  # images less similar than all but this fraction of known ones are unknown; see model.json


class Model:
    """What was exported. Prompts are known by their rows in two arrays; row 0 stands for no prompt."""

    def __init__(self, folder: Path = HERE, provider: str = "CPUExecutionProvider"):
        self.about: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        self.labels: list[str] = self.about["labels"]
        with np.load(folder / "prototypes.npz", allow_pickle=False) as arrays:
            self.arrays = {name: arrays[name] for name in arrays.files}
        # A class has a record in each task that it was learned in. Value centroids stand record by record.
        self.classes, self.tasks = self.arrays["record_classes"], self.arrays["record_tasks"]
        self.starts = np.searchsorted(self.arrays["value_records"], np.arange(len(self.classes)))
        self.network = onnxruntime.InferenceSession(str(folder / "embedding.onnx"), providers=[provider])

    def predict(self, paths: list[str]) -> list[tuple[str, float, float, bool]]:
        """(label, probability, similarity, unknown) of each image file."""
        images = np.stack([read_image(path, self.about["preprocessing"]) for path in paths])
        scores, similarities = self.match(images)
        best, rows = scores.argmax(axis=1), np.arange(len(paths))
        labels = [self.labels[place] for place in best]
        probabilities = softmax(scores / self.about["temperature"])[rows, best]
        limit, own = self.about["thresholds"].get(REJECT, -np.inf), self.about["own_thresholds"]
        limits = np.array([min(limit, own.get(label, limit)) for label in labels])
        unknown = similarities.max(axis=1) < limits
        found = (probabilities, similarities[rows, best], unknown)
        return list(zip(labels, *(column.tolist() for column in found), strict=True))

    def match(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Normalised images [B, 3, H, W] -> scores, the greatest wins, and similarities, [B, classes] each."""
        if self.about["rule"] == "evidence":
            return self.by_evidence(images)
        scores = self.by_centroids(images)
        return scores, scores

    def by_evidence(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return logits and similarities.

        First feature space, second one for uncertain images, then the prompts of the most probable tasks.
        """
        first, *others = views = self.about["views"]
        seen = {first["prompt"]: self.embed(images, np.full(len(images), first["prompt"]))}
        coarse, similarities = self.coarse(0, seen[first["prompt"]])
        logits = first["alone"] * coarse
        for number, view in enumerate(others, start=1):
            rows = self.unsure(logits).nonzero()[0]
            units = seen[view["prompt"]] = np.full_like(seen[first["prompt"]], np.nan)
            if len(rows):
                units[rows] = self.embed(images[rows], np.full(len(rows), view["prompt"]))
                other, _ = self.coarse(number, units[rows])
                logits[rows] = first["weight"] * coarse[rows] + view["weight"] * other
        posterior = np.zeros((len(images), len(self.arrays["task_prompts"])))
        np.add.at(posterior.T, self.tasks, softmax(logits)[:, self.classes].T)
        prompted = self.arrays["task_prompts"] > 0
        worth = posterior * (prompted & self.unsure(logits)[:, None] & (posterior >= self.about["open"]))
        tried = np.zeros_like(worth, dtype=bool)
        np.put_along_axis(tried, (-worth).argsort(axis=1)[:, : self.about["most"]], True, axis=1)
        tried &= worth > 0
        if tried.any():
            weight = self.about["fine"] * sum(view["weight"] for view in views)
            logits += weight * self.fine(images, seen, tried)
        return logits, similarities

    def unsure(self, logits: np.ndarray) -> np.ndarray:
        """Find the images [B] whose top-1 probability is too low to stop."""
        return softmax(logits).max(axis=1) < self.about["sure"]

    def coarse(self, view: int, embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores and similarities [B, classes]: whitened cosines of each layer and kernel ridge; cosines of the last."""
        named, prefix = self.arrays.items(), f"view{view}_"
        mine = {name.removeprefix(prefix): array for name, array in named if name.startswith(prefix)}
        layers, dim = mine["centre"].shape
        units = unit_vectors(embeddings.astype(np.float64).reshape(-1, layers, dim))
        parts = []
        for layer, centre in enumerate(mine["centre"]):
            centred = units[:, layer] - centre
            own = ((centred @ mine["precision"][layer]) * centred).sum(axis=1, keepdims=True)
            lengths = np.sqrt(np.maximum(own * mine["lengths"][layer], 1e-24))
            parts.append(centred @ mine["whitened"][layer].T / lengths)
        if "points" in mine:
            joint = unit_vectors(units - mine["ridge_centre"]).reshape(len(units), -1) / np.sqrt(layers)
            cosine = np.clip(joint @ mine["points"].T, -1, 1)
            angle = np.arccos(cosine)
            kernel = (np.sin(angle) + (np.pi - angle) * cosine) / np.pi
            parts.append(np.log(np.maximum(kernel @ mine["weights"], self.about["ridge_floor"])))
        scores = sum(share * part for share, part in zip(mine["shares"], parts, strict=True))
        return scores, (parts[0] + units[:, 0] @ mine["means"].T) / 2

    def fine(self, images: np.ndarray, seen: dict[int, np.ndarray], tried: np.ndarray) -> np.ndarray:
        """Return [B, classes]: greatest similarity under the prompts of the class's tasks.

        Classes that are not tried get the greatest of the others. `seen`: images under prompts that need no new pass.
        """
        rows, tasks = tried.nonzero()
        prompts = self.arrays["task_prompts"][tasks]
        dim = self.arrays["values"].shape[1]
        embeddings = np.empty((len(rows), dim), dtype=np.float32)
        new = ~np.isin(prompts, list(seen))
        embeddings[new] = self.embed(images[rows[new]], prompts[new])[:, :dim]
        for prompt, units in seen.items():
            embeddings[prompts == prompt] = units[rows[prompts == prompt], :dim]
        similarity = np.maximum.reduceat(embeddings @ self.arrays["values"].T, self.starts, axis=1)
        pairs, records = (tasks[:, None] == self.tasks).nonzero()
        fine = np.full((len(images), len(self.labels)), -np.inf)
        np.maximum.at(fine, (rows[pairs], self.classes[records]), similarity[pairs, records])
        usual = fine.max(axis=1, keepdims=True)
        return np.where(np.isinf(fine), np.where(np.isinf(usual), 0.0, usual), fine)

    def by_centroids(self, images: np.ndarray) -> np.ndarray:
        """[B, classes]: greatest similarity to a class's centroids."""
        keys, values = self.arrays["keys"], self.arrays["values"]
        # Coarse: key centroids nearest to the image without a prompt name the tasks whose prompts are tried.
        queries = self.embed(images, np.zeros(len(images), dtype=int))
        neighbours = min(self.about["neighbours"], len(keys))
        nearest = np.argpartition(-(queries @ keys.T), neighbours - 1, axis=1)[:, :neighbours]
        tried = np.zeros((len(images), len(self.arrays["prompts"])), dtype=bool)
        prompts = self.arrays["task_prompts"][self.arrays["key_tasks"][nearest]]
        np.put_along_axis(tried, prompts, True, axis=1)
        # Fine: the image under each of these prompts is compared with the value centroids of all classes.
        rows, prompts = tried.nonzero()
        embeddings = queries[rows]
        prompted = prompts > 0
        embeddings[prompted] = self.embed(images[rows[prompted]], prompts[prompted])
        similarity = np.maximum.reduceat(embeddings @ values.T, self.starts, axis=1)
        best = np.maximum.reduceat(similarity, np.searchsorted(rows, np.arange(len(images))), axis=0)
        scores = np.full((len(images), len(self.labels)), -np.inf, dtype=best.dtype)
        np.maximum.at(scores.T, self.classes, best.T)
        return scores

    def embed(self, images: np.ndarray, prompts: np.ndarray) -> np.ndarray:
        """Unit vectors of images, each under the prompt of its row: [B, D], or of several layers side by side."""
        width = self.network.get_outputs()[0].shape[1]
        embeddings = np.empty((len(images), width), dtype=np.float32)
        for start in range(0, len(images), BATCH):
            some = slice(start, start + BATCH)
            enters = self.arrays["enters"][prompts[some]]
            length = enters.any(axis=1).sum(axis=1).max()  # the rest is padding
            feed = {
                "images": images[some],
                "prompts": self.arrays["prompts"][prompts[some]][:, :, :length],
                "enters": enters[:, :, :length],
            }
            embeddings[some] = self.network.run(None, feed)[0]
        dim = self.arrays["values"].shape[1]
        return unit_vectors(embeddings.reshape(len(images), width // dim, dim)).reshape(len(images), width)


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors [..., D] to length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Turn logits [B, classes] into probabilities."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def read_image(path: str, how: dict[str, Any]) -> np.ndarray:
    """A file -> normalised float32 [3, size, size]: shorter side to the canvas, then the centre is kept."""
    try:
        with Image.open(path) as file:
            image = to_rgb(file)
    except Exception as error:  # a damaged file makes decoders raise nearly anything
        raise ValueError(f"{path} cannot be read as an image ({error})") from error
    longest, canvas = 16 * min(image.size), how["canvas"]
    image = centre(image, min(image.width, longest), min(image.height, longest))
    width, height = (canvas * side // min(image.size) for side in image.size)
    image = image.resize((width, height), Image.Resampling[how["interpolation"].upper()])
    image = centre(centre(image, canvas, canvas), how["image_size"], how["image_size"])
    pixels = np.asarray(image, dtype=np.float32) / np.float32(255)
    normalised = (pixels - np.float32(how["mean"])) / np.float32(how["std"])
    return normalised.transpose(2, 0, 1)


def centre(image: Image.Image, width: int, height: int) -> Image.Image:
    """Crop the middle of an image."""
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def to_rgb(image: Image.Image) -> Image.Image:
    """Upright RGB: orientation tag obeyed, transparency laid over white, 16 bits and floats scaled to 8."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if image.mode != "I" or values.max() > 255:
            values = (values + 128) // 257
        return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        values = np.nan_to_num(np.asarray(image, dtype=np.float32))
        values = (values * (255 if values.max() <= 1 else 1)).round()
        return Image.fromarray(values.clip(0, 255).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def main(paths: list[str]) -> None:
    """Predict image files and print a line for each."""
    if not paths:
        sys.exit("usage: python predict.py IMAGE...")
    model = Model()
    for start in range(0, len(paths), BATCH):
        some = paths[start : start + BATCH]
        try:
            results = model.predict(some)
        except ValueError as error:
            sys.exit(str(error))
        for path, (label, probability, similarity, unknown) in zip(some, results, strict=True):
            words = [
                path,
                label,
                f"{probability:.4f}",
                f"{similarity:.4f}",
                *(["unknown"] if unknown else []),
            ]
            print("\t".join(words), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
