"""The ways to round weights that are trained in bf16, for tests that try each."""

from __future__ import annotations

from typing import Literal

RoundingMode = Literal["exact", "stochastic", "nearest"]
