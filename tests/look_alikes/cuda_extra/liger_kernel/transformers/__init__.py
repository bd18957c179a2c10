"""The functional interface of liger-kernel."""
