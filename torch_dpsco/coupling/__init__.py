"""Do records reach each other, in a model or in a loss? Looked for on made-up records, and put back."""
