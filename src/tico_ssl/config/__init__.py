"""What a run is told: sections, recipes, studies, catalogues. Nothing here imports torch."""
