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
        # Value centroids are sorted by class: where each class begins.
        self.starts = np.searchsorted(self.arrays["value_classes"], np.arange(len(self.labels)))
        self.network = onnxruntime.InferenceSession(str(folder / "embedding.onnx"), providers=[provider])

    def predict(self, paths: list[str]) -> list[tuple[str, float, float]]:
        """(label, probability, similarity) of each image file."""
        scores = self.scores(np.stack([read_image(path, self.about["preprocessing"]) for path in paths]))
        powers = np.exp((scores - scores.max(axis=1, keepdims=True)) / self.about["temperature"])
        probabilities = powers.max(axis=1) / powers.sum(axis=1)
        labels = [self.labels[best] for best in scores.argmax(axis=1)]
        return list(zip(labels, probabilities.tolist(), scores.max(axis=1).tolist(), strict=True))

    def scores(self, images: np.ndarray) -> np.ndarray:
        """Normalised images [B, 3, H, W] -> [B, classes]: greatest similarity to a class's centroids."""
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
        return np.maximum.reduceat(similarity, np.searchsorted(rows, np.arange(len(images))), axis=0)

    def embed(self, images: np.ndarray, prompts: np.ndarray) -> np.ndarray:
        """Unit vectors [B, D] of images, each under the prompt of its row."""
        embeddings = np.empty((len(images), self.arrays["keys"].shape[1]), dtype=np.float32)
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
        return embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)


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
    if not paths:
        sys.exit("usage: python predict.py IMAGE...")
    model = Model()
    threshold, own = model.about["thresholds"].get(REJECT, -1.0), model.about["own_thresholds"]
    for start in range(0, len(paths), BATCH):
        some = paths[start : start + BATCH]
        try:
            results = model.predict(some)
        except ValueError as error:
            sys.exit(str(error))
        for path, (label, probability, similarity) in zip(some, results, strict=True):
            unknown = "\tunknown" if similarity < min(threshold, own.get(label, threshold)) else ""
            print(f"{path}\t{label}\t{probability:.4f}\t{similarity:.4f}{unknown}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
