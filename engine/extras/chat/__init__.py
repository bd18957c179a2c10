"""Talks to trained models: which weights to load, conversations that fit, streamed answers. No code of training."""
