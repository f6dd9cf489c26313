"""What a long run needs, whoever runs it: resuming and progress."""
