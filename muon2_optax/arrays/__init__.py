"""Tools for lists of arrays: trace them once for each shape, stack and split them."""
