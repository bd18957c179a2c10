"""The commands of the command line, a file per subject: each command parses its arguments, calls the engine, and
prints.

Modules that take long to import, `engine.spec` included, are imported inside the functions.
"""
