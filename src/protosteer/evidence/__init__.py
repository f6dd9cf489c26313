"""The default classifier: whitened cosine and kernel ridge, calibrated by leave-one-out."""
