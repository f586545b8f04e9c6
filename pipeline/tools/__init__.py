"""The commands that only ``cli.py`` imports."""
