"""Data sets, one file each: where they come from, what they must look like, how they are read."""
