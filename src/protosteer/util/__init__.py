"""Files, text, process groups and the machine: what every package may use."""
