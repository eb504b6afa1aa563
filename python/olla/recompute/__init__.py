"""Plans that run ops again, or write results in place, instead of keeping values."""
