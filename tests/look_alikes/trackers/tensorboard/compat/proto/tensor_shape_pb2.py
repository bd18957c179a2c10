"""Looks like tensorboard's shapes."""

from ...message import Message


class TensorShapeProto(Message):
    """A shape."""

    class Dim(Message):
        """One dimension."""
