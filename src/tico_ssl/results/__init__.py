"""Results of runs, read from disk: nothing here imports torch.

run_folder, record, reading              a run on disk, its state and results, and how they are read
metrics, statistics, collapse            meaning of numbers, mean and standard deviation over seeds, signs of collapse
confidence, intervals                    formulas of 95 % intervals, and how those of a result are read
verdict, ranking                         did pretraining help, which recipe is better, and can anybody tell
table, formats, comparison               tables in the terminal, as Markdown, CSV or LaTeX; several runs in one table
study_state                              progress of the runs of a study
"""
