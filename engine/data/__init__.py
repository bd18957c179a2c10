"""From files and hub data sets to batches of tokens. Heavy: imports datasets and numpy, and torch in `batch` alone.

`prepare` is the way in; `sources` reads rows, `formats` recognises them, `tokenise` and `chat` turn them into tokens,
`store` and `tokens` keep and serve those, `packing` puts documents together, `order` says which come at which step.
"""
