"""The widgets that screens are made of. They read no file: screens give them values, and they draw them."""
