"""Runs: following one, listing many, the text of their panes, and the engine processes behind them."""
