"""What attention says: the queries that it shows, their weights, and what a layer remembers of them."""
