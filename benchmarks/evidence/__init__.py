"""The study behind "which optimizer should I use": see README.md in this folder."""
