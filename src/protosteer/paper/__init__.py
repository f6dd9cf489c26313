"""The method and nothing else: a frozen ViT, prompts, prototypes, training, inference."""
