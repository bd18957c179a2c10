"""The Textual console. Imports only those parts of the engine that do not import torch."""
