"""How a step's sequences are cut into micro-batches that fit: their cost, the budget learned for it, the cut itself."""
