"""Results for the tools that serve them: merge, files, commands, a comparison of answers, push to the hub."""
