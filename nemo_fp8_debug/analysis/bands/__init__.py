"""What healthy runs do, learned from many, to judge a run that has no baseline. Internal."""
