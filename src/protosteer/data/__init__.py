"""Image files, arrays and datasets -> batches of pixels; preprocessing and augmentation."""

from protosteer.data.augment import Augmentation
from protosteer.data.images import ArrayImages, FileImages, ImageSet, LazyImages, as_images, as_labelled
from protosteer.data.transforms import Preprocessing

__all__ = [
    "ArrayImages",
    "Augmentation",
    "FileImages",
    "ImageSet",
    "LazyImages",
    "Preprocessing",
    "as_images",
    "as_labelled",
]
