"""Everything a run tells: metrics of a step, console, run folder, trackers, dumps, timing, watchdog."""
