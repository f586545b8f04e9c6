"""Statistics, verdicts and the effects of single techniques."""
