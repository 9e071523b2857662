"""The growth from one allocator's snapshot to another: as a table, as Markdown, as JSON."""
