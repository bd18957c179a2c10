"""Chat with trained models: weights to load, conversations that fit, streamed answers."""
