"""The subcommands that read recorded figures: baselines, reports, their history in git."""
