"""What existing suites ask for: defaults by folder, hidden skips told, an order by memory."""
