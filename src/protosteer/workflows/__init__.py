"""A user's own images: learn a folder, evaluate, reject unknown images, find label issues, choose a backbone."""
