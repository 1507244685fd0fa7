"""Where keys and values lie: slots of one tensor each."""
