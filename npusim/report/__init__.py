"""What a simulated device did, as series and pictures."""
