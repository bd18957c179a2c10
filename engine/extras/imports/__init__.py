"""Import of other tools' configurations as recipes."""
