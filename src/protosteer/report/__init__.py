"""What people look at: tables, plots, live progress."""
