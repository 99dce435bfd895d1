"""Where a served model's experts are leased from."""
