"""What every room may use: files, text, the system."""
