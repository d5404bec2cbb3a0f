"""Model families, one file each, and the registry that finds one by its architecture name."""
