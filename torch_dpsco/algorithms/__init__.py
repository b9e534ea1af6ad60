"""The algorithms of the papers: for each a file of classes and a file of numbers, which knows no torch."""
