"""A user's own images: teaching, rejection, inspection, export."""
