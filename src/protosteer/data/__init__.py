"""Image files, arrays and datasets -> batches of pixels; preprocessing and augmentation."""
