"""Results of runs, read from disk: nothing here imports torch.

run_folder, record, reading              a run on disk, its state and results, and how they are read
metrics, statistics, verdict, collapse   meaning of numbers, mean and standard deviation, did pretraining help
table, formats, comparison               tables in the terminal, as Markdown, CSV or LaTeX; several runs in one table
study_state                              progress of the runs of a study
"""
