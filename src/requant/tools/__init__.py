"""Command-line tools over plans, models and checkpoints."""
