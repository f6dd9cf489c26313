"""Predict with this exported model: python predict.py IMAGE...

Needs onnxruntime, numpy (which comes with it) and Pillow, which reads the image files:
pip install onnxruntime pillow
From other programs: `Model().predict(["a.jpg", "b.png"])`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

HERE = Path(__file__).resolve().parent
BATCH = 32
REJECT = "0.05"  # images less similar than all but this fraction of known ones are unknown; see model.json


class Model:
    """The exported model. A prompt is a row of two arrays; row 0 stands for no prompt."""

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
        """Predict image files; return (label, probability, similarity, unknown) of each."""
        images = np.stack([read_image(path, self.about["preprocessing"]) for path in paths])
        scores, similarities = self.match(images)
        top, rows = scores.argmax(axis=1), np.arange(len(paths))
        labels = [self.labels[place] for place in top]
        probabilities = softmax(scores / self.about["temperature"])[rows, top]
        limit, own_thresholds = self.about["thresholds"].get(REJECT, -np.inf), self.about["own_thresholds"]
        limits = np.array([min(limit, own_thresholds.get(label, limit)) for label in labels])
        is_unknown = similarities.max(axis=1) < limits
        columns = (probabilities, similarities[rows, top], is_unknown)
        return list(zip(labels, *(values.tolist() for values in columns), strict=True))

    def match(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Match normalised images [B, 3, H, W]; return scores, of which the greatest wins, and similarities, [B, classes]."""
        if self.about["rule"] == "evidence":
            return self.by_evidence(images)
        scores = self.by_centroids(images)
        return scores, scores

    def by_evidence(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return logits and similarities.

        All images pass the first feature space, uncertain ones the second, then prompts of the most probable tasks.
        """
        view0, *further_views = views = self.about["views"]
        cache = {view0["prompt"]: self.embed(images, np.full(len(images), view0["prompt"]))}
        coarse, similarities = self.coarse(0, cache[view0["prompt"]])
        logits = view0["alone"] * coarse
        for number, view in enumerate(further_views, start=1):
            rows = self.is_uncertain(logits).nonzero()[0]
            units = cache[view["prompt"]] = np.full_like(cache[view0["prompt"]], np.nan)
            if len(rows):
                units[rows] = self.embed(images[rows], np.full(len(rows), view["prompt"]))
                view_scores, _ = self.coarse(number, units[rows])
                logits[rows] = view0["weight"] * coarse[rows] + view["weight"] * view_scores
        posterior = np.zeros((len(images), len(self.arrays["task_prompts"])))
        np.add.at(posterior.T, self.tasks, softmax(logits)[:, self.classes].T)
        has_prompt = self.arrays["task_prompts"] > 0
        worth = posterior * (has_prompt & self.is_uncertain(logits)[:, None] & (posterior >= self.about["open"]))
        candidates = np.zeros_like(worth, dtype=bool)
        np.put_along_axis(candidates, (-worth).argsort(axis=1)[:, : self.about["most"]], True, axis=1)
        candidates &= worth > 0
        if candidates.any():
            weight = self.about["fine"] * sum(view["weight"] for view in views)
            logits += weight * self.fine(images, cache, candidates)
        return logits, similarities

    def is_uncertain(self, logits: np.ndarray) -> np.ndarray:
        """Find the images [B] whose top-1 probability is too low to stop."""
        return softmax(logits).max(axis=1) < self.about["sure"]

    def coarse(self, view: int, embeddings: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return scores (whitened cosines of each layer, kernel ridge) and similarities (cosines), [B, classes] each."""
        items, prefix = self.arrays.items(), f"view{view}_"
        view_arrays = {name.removeprefix(prefix): array for name, array in items if name.startswith(prefix)}
        layers, dim = view_arrays["centre"].shape
        units = unit_vectors(embeddings.astype(np.float64).reshape(-1, layers, dim))
        parts = []
        for layer, centre in enumerate(view_arrays["centre"]):
            offsets = units[:, layer] - centre
            norms = ((offsets @ view_arrays["precision"][layer]) * offsets).sum(axis=1, keepdims=True)
            lengths = np.sqrt(np.maximum(norms * view_arrays["lengths"][layer], 1e-24))
            parts.append(offsets @ view_arrays["whitened"][layer].T / lengths)
        if "points" in view_arrays:
            joint = unit_vectors(units - view_arrays["ridge_centre"]).reshape(len(units), -1) / np.sqrt(layers)
            cosine = np.clip(joint @ view_arrays["points"].T, -1, 1)
            angle = np.arccos(cosine)
            kernel = (np.sin(angle) + (np.pi - angle) * cosine) / np.pi
            parts.append(np.log(np.maximum(kernel @ view_arrays["weights"], self.about["ridge_floor"])))
        scores = sum(share * part for share, part in zip(view_arrays["shares"], parts, strict=True))
        return scores, (parts[0] + units[:, 0] @ view_arrays["means"].T) / 2

    def fine(self, images: np.ndarray, cache: dict[int, np.ndarray], candidates: np.ndarray) -> np.ndarray:
        """Return [B, classes]: greatest similarity under the prompts of the class's tasks.

        Classes outside the candidate tasks get an image's greatest similarity. `cache` has embeddings by prompt.
        """
        rows, tasks = candidates.nonzero()
        prompts = self.arrays["task_prompts"][tasks]
        dim = self.arrays["values"].shape[1]
        embeddings = np.empty((len(rows), dim), dtype=np.float32)
        is_new = ~np.isin(prompts, list(cache))
        embeddings[is_new] = self.embed(images[rows[is_new]], prompts[is_new])[:, :dim]
        for prompt, units in cache.items():
            embeddings[prompts == prompt] = units[rows[prompts == prompt], :dim]
        similarity = np.maximum.reduceat(embeddings @ self.arrays["values"].T, self.starts, axis=1)
        pairs, records = (tasks[:, None] == self.tasks).nonzero()
        fine = np.full((len(images), len(self.labels)), -np.inf)
        np.maximum.at(fine, (rows[pairs], self.classes[records]), similarity[pairs, records])
        row_maximum = fine.max(axis=1, keepdims=True)
        return np.where(np.isinf(fine), np.where(np.isinf(row_maximum), 0.0, row_maximum), fine)

    def by_centroids(self, images: np.ndarray) -> np.ndarray:
        """Return [B, classes]: greatest similarity to the centroids of each class."""
        keys, values = self.arrays["keys"], self.arrays["values"]
        # Coarse: the nearest key centroids of the image without a prompt select the candidate tasks.
        queries = self.embed(images, np.zeros(len(images), dtype=int))
        neighbours = min(self.about["neighbours"], len(keys))
        nearest = np.argpartition(-(queries @ keys.T), neighbours - 1, axis=1)[:, :neighbours]
        candidates = np.zeros((len(images), len(self.arrays["prompts"])), dtype=bool)
        prompts = self.arrays["task_prompts"][self.arrays["key_tasks"][nearest]]
        np.put_along_axis(candidates, prompts, True, axis=1)
        # Fine: the image under each of these prompts is compared with the value centroids of all classes.
        rows, prompts = candidates.nonzero()
        embeddings = queries[rows]
        has_prompt = prompts > 0
        embeddings[has_prompt] = self.embed(images[rows[has_prompt]], prompts[has_prompt])
        similarity = np.maximum.reduceat(embeddings @ values.T, self.starts, axis=1)
        class_scores = np.maximum.reduceat(similarity, np.searchsorted(rows, np.arange(len(images))), axis=0)
        scores = np.full((len(images), len(self.labels)), -np.inf, dtype=class_scores.dtype)
        np.maximum.at(scores.T, self.classes, class_scores.T)
        return scores

    def embed(self, images: np.ndarray, prompts: np.ndarray) -> np.ndarray:
        """Embed images under the prompts of their rows; return unit vectors [B, D], of several layers side by side."""
        width = self.network.get_outputs()[0].shape[1]
        embeddings = np.empty((len(images), width), dtype=np.float32)
        for start in range(0, len(images), BATCH):
            batch = slice(start, start + BATCH)
            enters = self.arrays["enters"][prompts[batch]]
            length = enters.any(axis=1).sum(axis=1).max()  # the rest is padding
            feed = {
                "images": images[batch],
                "prompts": self.arrays["prompts"][prompts[batch]][:, :, :length],
                "enters": enters[:, :, :length],
            }
            embeddings[batch] = self.network.run(None, feed)[0]
        dim = self.arrays["values"].shape[1]
        return unit_vectors(embeddings.reshape(len(images), width // dim, dim)).reshape(len(images), width)


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors [..., D] to length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Turn logits [B, classes] into probabilities."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def read_image(path: str, preprocessing: dict[str, Any]) -> np.ndarray:
    """Read a file as normalised float32 [3, size, size]: resize the shorter side to the canvas, crop the centre."""
    try:
        with Image.open(path) as file:
            image = to_rgb(file)
    except Exception as error:  # a damaged file makes decoders raise nearly anything
        raise ValueError(f"{path} cannot be read as an image ({error})") from error
    longest, canvas = 16 * min(image.size), preprocessing["canvas"]
    image = centre(image, min(image.width, longest), min(image.height, longest))
    width, height = (canvas * side // min(image.size) for side in image.size)
    image = image.resize((width, height), Image.Resampling[preprocessing["interpolation"].upper()])
    image = centre(centre(image, canvas, canvas), preprocessing["image_size"], preprocessing["image_size"])
    pixels = np.asarray(image, dtype=np.float32) / np.float32(255)
    values = (pixels - np.float32(preprocessing["mean"])) / np.float32(preprocessing["std"])
    return values.transpose(2, 0, 1)


def centre(image: Image.Image, width: int, height: int) -> Image.Image:
    """Crop the middle of an image."""
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an upright RGB image: apply the orientation tag, lay transparency over white, scale values to 8 bits."""
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


def predict_each(model: Model, paths: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield every path with its prediction, or with the error that says why it cannot be read."""
    try:
        results: list[Any] = model.predict(paths)
    except ValueError as error:
        if len(paths) == 1:
            yield paths[0], error
        else:
            for path in paths:
                yield from predict_each(model, [path])
    else:
        yield from zip(paths, results, strict=True)


def main(paths: list[str]) -> None:
    """Predict image files and print a line for each; name those that cannot be read."""
    if not paths:
        sys.exit("usage: python predict.py IMAGE...")
    model, failures = Model(), 0
    for start in range(0, len(paths), BATCH):
        for path, result in predict_each(model, paths[start : start + BATCH]):
            if isinstance(result, ValueError):
                print(result, file=sys.stderr, flush=True)
                failures += 1
                continue
            label, probability, similarity, is_unknown = result
            words = [path, label, f"{probability:.4f}", f"{similarity:.4f}", *(["unknown"] if is_unknown else [])]
            print("\t".join(words), flush=True)
    if failures:
        sys.exit(f"{failures} of {len(paths)} files could not be read; the others were predicted")


if __name__ == "__main__":
    main(sys.argv[1:])
