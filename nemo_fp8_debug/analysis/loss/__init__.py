"""What a run's loss did, and how far it lies above another's. Internal."""
