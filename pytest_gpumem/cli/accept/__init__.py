"""``gpumem accept``: write the baselines of a finished session from its report."""
