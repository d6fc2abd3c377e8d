"""Running code that a model wrote: in a process that is shut in (`local`), or by a service elsewhere (`service`)."""
