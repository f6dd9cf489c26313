"""Protocol, accuracy matrix, metrics and error analysis of class-incremental learning."""
