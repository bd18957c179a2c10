"""Data: from files and hub data sets to batches of tokens.

`prepare` uses the rest: `sources` reads rows, `formats` recognises them, `tokenise` and `chat` make tokens and target
tokens, `store` caches them, `tokens` serves them. `order` packs documents into rows and chooses the samples of each
optimizer step, `batch` pads them to a micro-batch.
"""
