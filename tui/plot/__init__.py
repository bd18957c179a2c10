"""Loss curves: bounded series of points, braille drawing, and the two plot widgets."""
