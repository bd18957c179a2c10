"""The commands of the command line, a file per subject: each parses its arguments, calls the engine, and prints.

What takes long to import, `engine.spec` included, is imported inside the functions.
"""
