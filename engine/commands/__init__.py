"""The commands of the command line, a file per subject.

What takes long to import, `engine.config` included, is imported inside the functions.
"""
