"""Which tokens a forward may see: masks, pads, and which models ask for them."""
