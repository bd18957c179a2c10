"""Runs of several stages, each an ordinary run in `RUN/stages/01-NAME` with an engine process of its own, so that no
memory of one stage can reach the next."""
