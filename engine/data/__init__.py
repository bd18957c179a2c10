"""From files and hub data sets to batches of tokens. Heavy: imports datasets and numpy; `batch` also imports torch.

Start at `prepare`, which uses the rest: `sources` reads rows, `formats` recognises their format, `tokenise` and `chat`
turn them into tokens, `store` caches the tokens on disk, `tokens` serves them, and `packing` fits documents into rows.
`order` chooses the samples of each optimizer step, and `batch` pads them to the tensors of a micro-batch.
"""
