"""What more devices bring: the links between them, the curve over their number, and what each point costs."""
