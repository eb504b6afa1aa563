"""Choice of what forward saves for backward and what backward recomputes."""
