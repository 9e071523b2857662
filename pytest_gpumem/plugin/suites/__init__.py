"""Services for existing suites: defaults by folder, hidden skips told, an order by memory."""
