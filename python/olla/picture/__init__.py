"""Where memory goes, for the eye."""
