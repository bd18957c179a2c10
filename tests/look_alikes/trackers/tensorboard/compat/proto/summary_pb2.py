"""Looks like tensorboard's summaries."""

from ...message import Message


class Summary(Message):
    """Some values."""

    class Value(Message):
        """One value with its tag."""


class SummaryMetadata(Message):
    """How a value is shown."""

    class PluginData(Message):
        """The plugin that shows it."""
