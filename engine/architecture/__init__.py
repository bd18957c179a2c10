"""Facts about models from their config files: layers, widths, heads, experts, names of parameters."""
