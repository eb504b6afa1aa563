"""What all folders may use: files, numbers as text, progress, rivals of a search."""
