"""What can be wrong with a run, a file a question; each rule prints its evidence, and none guesses. Internal."""
