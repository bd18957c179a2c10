"""Every key of a recipe and a profile, in every branch of a run: a changed value acts, is rejected, or is noted."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
