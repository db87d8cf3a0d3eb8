"""Settings of a run: sections, recipes, studies, catalogues. Nothing here imports torch."""
