"""Plans that recompute ops, or write results in place, instead of keeping values."""
