"""The Launch screen's parts: a choice, its evaluation into a plan, and the widgets that show both."""
