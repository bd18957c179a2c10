"""Hours of use in minutes: what must not grow while a console, a chat and a follower run for a day."""
