"""The slots of each record: in the durable commits, and in the open store between them."""
