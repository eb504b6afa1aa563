"""Where everything lies: offsets for given lifetimes."""
