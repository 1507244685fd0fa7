"""What is fitted to a model: calibrations, gates, bases and kernels."""
