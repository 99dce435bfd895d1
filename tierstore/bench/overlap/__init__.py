"""How much of gathers and expert fetches computation hides; and how well the simulated schedule predicts it."""
