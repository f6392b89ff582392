"""Where a leaf goes when no rule says so: its names, its neighbours, and doubts."""
