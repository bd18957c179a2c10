"""Looks like tensorboard's tensors."""

from ...message import Message


class TensorProto(Message):
    """A tensor."""
