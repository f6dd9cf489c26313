"""Checkpoints, progress, devices and executors of long runs."""
