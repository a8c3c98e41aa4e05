"""What all stages do with arrays: sort by class, put together what meets. Knows no record."""
