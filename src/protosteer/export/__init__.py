"""Export a model for other runtimes (ONNX)."""
