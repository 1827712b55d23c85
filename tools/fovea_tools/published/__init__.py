"""Published results as recipes, with the authors' settings and figures, and the command `fovea reproduce`."""
