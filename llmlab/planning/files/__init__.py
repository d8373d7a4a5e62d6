"""A configuration as files that run it: a script, engines' settings, and what starts them."""
