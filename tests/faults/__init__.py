"""Processes of a run that are killed at a chosen moment, and what must hold afterwards."""
