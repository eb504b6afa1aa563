"""What to save for backward and what to run again."""
