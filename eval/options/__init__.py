"""What commands may be told: each option is written down once, and everything else follows from it."""
