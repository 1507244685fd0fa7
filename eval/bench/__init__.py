"""`paged-eviction bench`: what a decoded token costs, in time and memory, with this cache and with others."""
