"""What the screens are made of. Nothing here reads a file: widgets are given values and draw them."""
