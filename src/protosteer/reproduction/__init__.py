"""The paper's tables and figures as experiments: one TOML file each in `experiments/paper/`."""
