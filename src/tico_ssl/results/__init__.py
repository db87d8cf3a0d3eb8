"""What came of runs, read and never computed: nothing here imports torch.

run_folder, record, reading     a run on disk, what is known of it, and how that is read
metrics, statistics, verdict, collapse   what numbers mean, mean and standard deviation, did pretraining help
table, formats, comparison      results in the terminal, as Markdown, CSV or LaTeX, and several runs in one table
study_state                     how far the runs of a study are
"""
