"""What a finished run leaves for people: `summary.json`, `learning_curve.png`, `timeline.png`."""
