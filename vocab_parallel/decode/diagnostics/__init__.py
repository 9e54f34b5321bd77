"""Observations of logits: margin, entropy, calibration, and what intermediate layers read as."""
