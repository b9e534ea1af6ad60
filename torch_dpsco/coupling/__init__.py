"""Do records reach each other, in a model or in a loss? Tried on synthetic records, and undone afterwards."""
