"""The shipped recipes of real-world systems on tiny models: tests of what each of these systems must do."""
