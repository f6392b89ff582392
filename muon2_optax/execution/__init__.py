"""How the matrices of a tree run, on one device and on a mesh."""
