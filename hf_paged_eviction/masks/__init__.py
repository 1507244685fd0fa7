"""Which tokens a forward may see: masks and pads."""
