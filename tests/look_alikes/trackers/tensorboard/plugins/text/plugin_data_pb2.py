"""Looks like the messages of tensorboard's text plugin."""

from ...message import Message


class TextPluginData(Message):
    """Says that a tensor is text."""
