"""Speed, always as a ratio measured within one run: reference time / our time, larger is better."""
