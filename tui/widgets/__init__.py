"""The widgets that screens are made of. Widgets read no files; they draw the values that screens pass to them."""
