"""Scores that were fitted: to attention (calibration) and on hidden states (gates)."""
