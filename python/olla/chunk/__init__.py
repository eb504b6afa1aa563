"""Large losses in chunks of rows."""
