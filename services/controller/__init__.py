"""The controller: the public API, the queue of runs, the state machine of each run."""
