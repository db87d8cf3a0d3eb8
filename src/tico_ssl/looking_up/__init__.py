"""Look things up in a set of images by their features. See docs/search-and-curate.md.

index                             features of all images in the cache, computed once
searching                         the nearest images of queries
curating                          near-duplicates, outliers and a subset, by
duplicates, outliers, coverage    connected pairs, distant neighbours, k-centre greedy
findings                          what either has found
pages, sheet, tables, curation_files   what is written of it
"""
