"""What a finished run can be turned into."""
