"""The Launch screen's parts: the choice of profile and recipe, its evaluation, and the widgets that show both."""
