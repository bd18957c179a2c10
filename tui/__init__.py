"""The console in Textual, which imports only packages without torch."""
