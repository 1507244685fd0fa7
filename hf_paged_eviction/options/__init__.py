"""What may be asked of a cache: each option once, how it is given, checked, and chosen where nobody says."""
