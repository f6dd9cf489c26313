"""Protocol, accuracy matrix, metrics and diagnosis of class-incremental learning."""
