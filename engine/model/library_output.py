"""Turns off progress bars and warnings of transformers, which would clutter logs and results.

Try: `tunedeck plan -p 80gb -r lora --exact`
"""

from __future__ import annotations

import warnings

from transformers.utils import logging as transformers_logging


def disable_progress_bars() -> None:
    """Turn off progress bars in this process."""
    transformers_logging.disable_progress_bar()


def silence_libraries() -> None:
    """Turn off progress bars and deprecation warnings, for commands that print results."""
    disable_progress_bars()
    transformers_logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)
    warnings.simplefilter("ignore", DeprecationWarning)
