"""Learned state as data: records, memory, the model file."""
