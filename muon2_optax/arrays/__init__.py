"""Lists of arrays: traced once for each shape, stacked and split again."""
