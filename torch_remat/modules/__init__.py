"""Whole models: their submodules as regions, or as what a region keeps, chosen by patterns on their names."""
