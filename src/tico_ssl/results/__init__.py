"""What came of runs: folders, records, tables, verdicts. Nothing here imports torch."""
