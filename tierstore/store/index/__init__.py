"""Which slots each record lies in: as of the durable commits, and in the open store between them."""
