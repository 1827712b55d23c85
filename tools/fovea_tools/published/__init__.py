"""Published results as recipes: the authors' settings and figures, and `fovea reproduce`."""
