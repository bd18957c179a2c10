"""The console's place. The import contracts already hold it apart from torch and from the heavy half of the engine."""
