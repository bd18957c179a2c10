"""Facts about models, read from their config files: layers, widths, heads, experts, names of parameters."""
