"""Memory of each process as its optimizer has stepped. Internal."""
