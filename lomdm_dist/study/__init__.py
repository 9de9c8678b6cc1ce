"""What a step costs: measured, and planned."""
