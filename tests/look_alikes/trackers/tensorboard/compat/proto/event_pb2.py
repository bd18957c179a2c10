"""Looks like tensorboard's event messages."""

from ...message import Message


class Event(Message):
    """A record of an event file."""


class SessionLog(Message):
    """The start of a session."""

    START = 1
