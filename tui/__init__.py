"""The Textual console. Imports light rooms of the engine only: no torch in its process, ever."""
