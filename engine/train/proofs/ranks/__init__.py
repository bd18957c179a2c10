"""Proofs among the ranks of a run: what several devices share, and what happens when one of them fails."""
