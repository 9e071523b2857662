"""``gpumem accept``: the baselines of a session that is over, written from its report."""
