"""The paper and nothing else: contrastive prototypical prompts (CPP) on a frozen ViT.

Read `task` (Algorithm 1), then `trainer`, `losses`, `prototypes` and `vit`; `inference` is Algorithm 2.
`examples/cpp_minimal.py` puts them together.
"""
