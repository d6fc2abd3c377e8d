"""`verl prove`: checks of a training command on its own model, data and template, by the parts of the run itself."""
