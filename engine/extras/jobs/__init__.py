"""Jobs that train a recipe elsewhere: scripts for clusters, containers and services."""
