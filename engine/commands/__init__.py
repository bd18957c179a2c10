"""The commands, a file per subject: each parses, calls a room, prints.

Heavy imports, `engine.spec` included, go inside the functions.
"""
