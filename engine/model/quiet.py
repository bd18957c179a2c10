"""Keeps transformers and datasets from drawing on our output: a bar that redraws itself fills a log with copies."""

from __future__ import annotations

import warnings

import datasets
from transformers.utils import logging as transformers_logging


def without_bars() -> None:
    """No progress bars from here on, in this process."""
    transformers_logging.disable_progress_bar()
    datasets.disable_progress_bars()


def without_chatter() -> None:
    """No progress bars, no warnings meant for the libraries' own developers: for commands that print results."""
    without_bars()
    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
