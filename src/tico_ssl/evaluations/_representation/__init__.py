"""What can be said of a cloud of features: who is near whom, how many dimensions it fills, what moves it.

The protocols that report it, with their settings, are the files of `evaluations/`.
"""
